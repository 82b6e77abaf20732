"""Promises to requests: lookups, waits for pages and for free slots, and failed loads that limit later promises."""
