"""The commands of gateways and of their experiments."""
