"""Projection files of other tools: reading them, what is wrong with them, and mending it."""
