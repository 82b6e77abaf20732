"""Names of another project that is also called flexkv, under which engines may look for it. A new engine needs none:
see `flexkv/adapters/`."""
