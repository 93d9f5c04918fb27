"""Runs and sweeps as they lie under a storage: found, summarised, compared, named and deleted. Nothing is unpickled."""
