"""Adapter to tensors, streams and events of torch, for hosts that are no serving engine."""
