"""Clients of a gateway over HTTP: requests, the answers that they read, and episodes that are played against it."""
