"""What is kept or sent of a teacher's predictions: forms of targets, and records of bytes."""
