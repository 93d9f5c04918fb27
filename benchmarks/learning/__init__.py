"""Learning: the scores that algorithms reach, and the time that they compute."""
