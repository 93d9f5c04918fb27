"""The mathematics of losses.

It has ratios, divergences, clipped losses, and the weights by which tokens become one number.
"""
