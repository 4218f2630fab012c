"""The format: records of tokens, files of windows, and what a cache is of."""
