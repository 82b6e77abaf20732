"""The `flexkv` command."""
