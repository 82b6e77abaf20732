"""Pages between host memory and the tiers behind it: fetched, written, and what becomes of plans that break off."""
