"""Ways to sample from a causal language model; `policies/engines/sampler.py` chooses among them."""
