"""Decides which blocks of an engine's requests are offered to the cache, and when. All engines share these planners."""
