"""The journal of a run: rows and events that workers write to its storage, which are delivered to the sinks."""
