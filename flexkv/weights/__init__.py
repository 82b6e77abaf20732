"""Identifies an engine's weights by a fingerprint of samples of their files, and by a digest of all their content."""
