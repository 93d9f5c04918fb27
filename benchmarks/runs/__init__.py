"""What a run, a sweep and a command cost besides the learning."""
