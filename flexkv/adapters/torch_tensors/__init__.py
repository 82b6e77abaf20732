"""Adapter to torch's tensors, streams and events, for the adapters of engines and for other programs."""
