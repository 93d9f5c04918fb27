"""What a sweep tries next: search spaces, schedulers and the plan."""
