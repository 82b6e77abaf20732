"""What `flexkv remote` does: jobs against a store, carried out here or in a process of their own."""
