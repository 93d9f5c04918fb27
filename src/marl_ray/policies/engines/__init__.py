"""Ways to sample from a causal language model; `policies/sampler.py` chooses among them."""
