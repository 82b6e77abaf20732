"""A conversation with a real engine that uses flexkv, and the tools to drive an engine."""
