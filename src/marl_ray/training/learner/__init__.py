"""One policy's update of one batch."""
