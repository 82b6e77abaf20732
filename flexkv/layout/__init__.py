"""Lowers each engine's KV pool to one kind of view: handlers check geometry, build views, and do nothing else."""
