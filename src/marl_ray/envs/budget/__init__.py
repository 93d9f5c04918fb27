"""A hard limit on spending around any environment, and a small environment with exact solutions."""
