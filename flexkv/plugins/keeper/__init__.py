"""A process between an engine and its plugins: starts them, starts them again, bounds their output, ends them."""
