"""Raw files: moves blocks between a pool and files without headers, for callers that keep their own index."""
