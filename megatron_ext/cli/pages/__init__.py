"""Reports of the verbs: HTML pages of one frame, and text for a terminal."""
