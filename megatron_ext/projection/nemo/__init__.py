"""Projection files and tools of NeMo RL: reading, judging and writing the files."""
