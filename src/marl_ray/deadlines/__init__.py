"""Waits with a deadline for the whole of what is waited for: calls side by side, tasks of one loop, answers over HTTP.

`seconds` has the range of the seconds that a user sets.
"""
