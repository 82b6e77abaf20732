"""Simulations that drive the cache manager through everything that can go wrong, without an engine."""
