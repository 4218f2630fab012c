"""What runs left behind as one page: read, drawn and compared."""
