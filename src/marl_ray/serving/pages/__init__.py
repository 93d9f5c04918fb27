"""Templates, style sheet and rows of the page for people."""
