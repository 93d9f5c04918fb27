"""Language models as policies: the scoring of responses, adapters, packed passes, random numbers."""
