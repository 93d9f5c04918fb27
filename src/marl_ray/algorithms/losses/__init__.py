"""The mathematics of losses: ratios, divergences, clipped losses, and the weights that turn tokens into one number."""
