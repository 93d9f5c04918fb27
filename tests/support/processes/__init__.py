"""Other processes that tests start, and the command line inside their own."""
