"""The programs `marl-ray try` and `marl-ray demo`, which show the product to a newcomer on one machine."""
