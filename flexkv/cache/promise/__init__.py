"""How requests get promises: lookups, waits for pages and free slots, and failed loads that limit later promises."""
