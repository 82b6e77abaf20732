"""Tests that run a real SGLang engine, or parts of one, with flexkv in it."""
