"""The configuration of a run: frozen dataclasses, and their file, flags and exclusions."""
