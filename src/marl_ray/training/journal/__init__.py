"""The journal of a run: the rows and events that workers write to the run's storage, and their delivery to the sinks."""
