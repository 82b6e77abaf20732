"""Modules that have the same names as modules of another package called flexkv, because engines may import these names.
A new engine needs no module here; its code belongs in `flexkv/adapters/`."""
