"""Redis, and servers that speak as it does, as a store: `store` is the client, all others are its parts."""
