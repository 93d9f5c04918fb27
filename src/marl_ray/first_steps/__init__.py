"""The programs that show the product to a newcomer on one machine: `marl-ray try` and `marl-ray demo`."""
