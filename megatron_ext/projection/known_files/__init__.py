"""Projection files of other tools: reading them, judging them, writing them."""
