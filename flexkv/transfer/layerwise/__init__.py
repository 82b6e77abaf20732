"""Layerwise pipelines: one layer loads while the one before is transformed and the one before that is scattered."""
