"""Raw files: blocks between files without headers and a pool, for callers with an index of their own."""
