"""A remote teacher: a server around it, and a student's connections to it, over Arrow Flight."""
