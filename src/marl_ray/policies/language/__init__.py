"""Language models as policies: scoring responses, adapters, packed passes, random numbers."""
