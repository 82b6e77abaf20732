"""Clients of stores that machines share. `base` is their contract; they run in a separate process, the helper."""
