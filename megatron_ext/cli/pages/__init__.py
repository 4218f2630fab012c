"""What the verbs show to a person: pages of one frame, and text in a terminal."""
