"""Which arm a unit gets, which units take part, and whether the shares are as promised."""
