"""What objectives compare: forms of teacher targets, vocabularies, completions."""
