"""Stores that machines share, behind one contract: `base`. Their clients run in a process of their own."""
