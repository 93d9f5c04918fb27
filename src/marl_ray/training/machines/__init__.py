"""The machines of a run: their capacity, the workers on them, full disks, and signals that interrupt the driver."""
