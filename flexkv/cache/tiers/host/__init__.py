"""Host memory: the hub, to which pages of all other tiers are fetched and from which they are written."""
