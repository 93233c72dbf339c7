"""A scorer of sentences."""
