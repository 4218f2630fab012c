"""Several losses as one: teachers, weights against cross-entropy, the familiar facade."""
