"""Redis, or any server that speaks its protocol, as a store: `store` is the client, the other modules are its parts."""
