"""Which blocks of an engine's requests are offered to the cache, and when: one planner for all engines."""
