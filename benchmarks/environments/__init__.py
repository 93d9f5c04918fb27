"""Environment steps per second, with and without learning."""
