"""The machines of a run.

These files compare their capacity with a run's needs, watch the workers on them, recognise full disks, and handle
interruptions of the driver.
"""
