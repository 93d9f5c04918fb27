"""The mathematics of losses: ratios, divergences, clipped losses, and how tokens become one number."""
