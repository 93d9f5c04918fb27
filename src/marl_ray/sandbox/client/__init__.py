"""The side of whoever runs programs: a pool of workers."""
