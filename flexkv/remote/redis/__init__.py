"""Redis, and servers that speak its protocol, as a store: `store` is the client, the other modules are its parts."""
