"""Assignment: the units that take part, the arm of each, and a test of the arms' shares."""
