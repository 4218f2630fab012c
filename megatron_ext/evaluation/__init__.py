"""Evaluation of a model by tasks, through a language model that scores and generates."""
