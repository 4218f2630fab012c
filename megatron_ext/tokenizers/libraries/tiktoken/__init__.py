"""tiktoken rank files of every layout."""
