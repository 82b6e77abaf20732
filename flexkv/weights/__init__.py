"""What an engine's weights are: their files, a fingerprint of samples, and a digest of all of their content."""
