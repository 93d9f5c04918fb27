"""The gradient steps of PPO on small perceptrons as compiled code, equal to torch's within 1e-5."""
