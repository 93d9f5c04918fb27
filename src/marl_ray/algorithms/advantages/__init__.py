"""What a decision was worth: rewards become advantages, with and without a critic."""
