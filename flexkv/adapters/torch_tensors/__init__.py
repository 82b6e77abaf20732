"""Connects flexkv's layerwise pipelines to torch's tensors, streams and events. The adapters of engines use it, and
other programs may."""
