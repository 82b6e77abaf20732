"""The jobs that `flexkv remote` does at a store, in this process or in a separate one."""
