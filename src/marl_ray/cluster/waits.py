"""The waits for a cluster, by Ray's dashboard and by Kubernetes' API, and the exit status with which Ctrl-C ends one."""

CONNECT_S, READ_S = 5.0, 30.0
"""Deadlines of one HTTP request, for its connection and for its answer, in seconds; neither client sets any."""
LOST_S = 60.0
"""Seconds for which a dashboard or an API may be out of reach before a command gives up: a restart takes less."""
JOB_TIMEOUT_S = 7 * 24 * 3600.0
"""Seconds for which a job is waited for unless the caller says otherwise: a week, which is longer than runs take."""
INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as shells report it: 128 and the number of SIGINT."""
