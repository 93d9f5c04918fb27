"""The Open Inference Protocol v2 (github.com/kserve/open-inference-protocol) for actor-critics, over REST."""
