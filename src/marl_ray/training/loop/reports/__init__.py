"""Reports of a run about itself: the time of its phases, numbers that are not finite, reasons for learning by torch."""
