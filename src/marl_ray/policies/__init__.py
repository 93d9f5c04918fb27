"""Policies: actor-critics and language models, their engines and bundles, and how all workers decide as one."""
