"""Whether an algorithm does what its formulas say: tiny games whose expectations are enumerated, and properties on them."""
