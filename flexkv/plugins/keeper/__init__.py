"""A process between an engine and its plugins: starts, restarts and ends them, and bounds their output."""
