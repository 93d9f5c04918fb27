"""Gateways of small bundles, and the logs that such gateways export."""
