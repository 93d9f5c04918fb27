"""Waits with a deadline for the whole of what is waited for: calls side by side, and answers over HTTP."""
