"""Clients of stores that machines share. `base` is their contract. They run in a separate process, the helper."""
