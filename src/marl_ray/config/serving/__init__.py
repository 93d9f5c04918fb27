"""The config of a gateway: experiments, arms and metrics."""
