"""Moves of pages between host memory and the tiers behind it, and the undoing of interrupted plans."""
