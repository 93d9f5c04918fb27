"""Policies: actor-critics and language models, the engines that sample from them, and the bundles they are served from."""
