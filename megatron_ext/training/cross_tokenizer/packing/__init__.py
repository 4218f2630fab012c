"""Documents in an order, packed into full rows, in batches."""
