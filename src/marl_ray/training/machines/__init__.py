"""The machines of a run: capacity, the workers on them, where they work, full disks, and interruptions of the driver."""
