"""Copies blocks between an engine's pool and raw files without headers, for callers that keep their own index."""
