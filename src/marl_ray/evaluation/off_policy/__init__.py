"""Off-policy evaluation: the outcome of a bundle on logged units, estimated before any user meets it."""
