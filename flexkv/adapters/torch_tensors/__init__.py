"""Adapter to torch's tensors, streams and events, for hosts that are not serving engines."""
