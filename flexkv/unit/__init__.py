"""One ownership unit: host memory, the tiers behind it and their manager, built in one step."""
