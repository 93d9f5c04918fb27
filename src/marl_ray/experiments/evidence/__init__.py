"""Evidence: sums over the store's units, looks at them, and series for charts."""
