"""From documents to the batches of a run, and of plain data loaders of torch."""
