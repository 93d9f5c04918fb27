"""Language models: their speed, their memory and what they learn."""
