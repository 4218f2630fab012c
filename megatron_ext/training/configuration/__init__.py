"""The configuration of a run: its sections as frozen dataclasses, its file, flags and exclusions."""
