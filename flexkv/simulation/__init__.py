"""The cache manager driven through everything that can go wrong, without an engine."""
