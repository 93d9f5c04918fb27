"""Learning before the first iteration, or without play: demonstrations, logged decisions, served texts."""
