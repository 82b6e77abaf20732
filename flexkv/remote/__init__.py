"""Stores that machines share, behind one contract: `base`. Their clients run in a separate process."""
