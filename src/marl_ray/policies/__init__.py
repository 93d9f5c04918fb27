"""Policies: actor-critics, their networks and spaces, and the bundles they are served from."""
