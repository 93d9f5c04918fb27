"""Off-policy evaluation: the outcome that a bundle would have on logged units, estimated before any user meets it."""
