"""Names under which other projects look for flexkv."""
