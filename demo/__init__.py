"""A conversation through a real engine with flexkv behind it, and the means to steer an engine."""
