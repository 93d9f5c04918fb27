"""Named algorithms whose baseline is a group of sequences, a greedy episode or the batch."""
