"""The preparation of a batch before its gradient steps: everything that is constant across its epochs."""
