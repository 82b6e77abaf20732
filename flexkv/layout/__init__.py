"""Translates each engine's KV pool into views of one kind (`KvView`). Handlers check the geometry and build the
views."""
