"""What the store's units say: sums, looks and series, continued from look to look."""
