"""A client of servers with the protocol of Redis. `store` is the client; the other modules are its parts."""
