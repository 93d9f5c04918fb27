"""The gateway and its experiments: speed, faults and statistics."""
