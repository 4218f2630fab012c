"""Memory that a teacher's server and a student share, so that targets need not be sent."""
