"""Identifies an engine's weights: their files, a fingerprint of samples, and a digest of all of their content."""
