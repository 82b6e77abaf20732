"""Raw files: moves blocks between a pool and files without headers, for callers with their own index."""
