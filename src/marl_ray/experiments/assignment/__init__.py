"""Assignment: the arm of each unit, the units that take part, and a check that arms get the shares they were promised."""
