"""Engines that complete prompts with a run's student."""
