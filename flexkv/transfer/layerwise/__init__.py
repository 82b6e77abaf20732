"""Layerwise pipelines: while layer i is loaded, layer i-1 is transformed and layer i-2 is written to paged memory."""
