"""The mathematics of losses: ratios, divergences, clipped losses, and the weights by which tokens become one number."""
