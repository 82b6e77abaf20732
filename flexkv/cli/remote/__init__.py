"""The jobs of `flexkv remote` against a store, run in this process or in a separate one."""
