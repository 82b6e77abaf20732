"""The keeper: a process between an engine and its plugins that starts, restarts and ends plugins, and bounds their
output."""
