"""Requests to a Kubernetes API: read, apply, delete, watch, wait, and follow logs."""
