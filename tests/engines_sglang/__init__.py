"""Tests that run a real inference engine with flexkv in it."""
