"""The journal of a run.

It is the rows and events that workers write to the run's storage, which are delivered to the sinks.
"""
