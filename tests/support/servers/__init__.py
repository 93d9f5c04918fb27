"""Servers that tests ask, and the browser that looks at them."""
