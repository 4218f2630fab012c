"""Teachers of a run in other processes: their ranks, processes and servers, and reaching them."""
