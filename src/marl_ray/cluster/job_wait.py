"""The wait for a job: its longest time, and the exit status with which Ctrl-C ends it."""

JOB_TIMEOUT_S = 7 * 24 * 3600.0
"""Seconds for which a job is waited for unless the caller says otherwise: a week, which is longer than runs take."""
INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as shells report it: 128 and the number of SIGINT."""
