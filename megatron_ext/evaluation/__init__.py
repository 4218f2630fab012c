"""What a model can do, measured: tasks over a language model that scores and generates."""
