"""How a request is read and answered."""
