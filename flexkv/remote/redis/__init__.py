"""A client of Redis servers, or of others with its protocol. `store` is the client, the other modules are its parts."""
