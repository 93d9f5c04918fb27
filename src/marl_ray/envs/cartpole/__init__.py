"""Gymnasium's CartPole as a compiled batch, equal to the package step for step."""
