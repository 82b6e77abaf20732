"""Plans moves of pages between host memory and the tiers behind it, and undoes interrupted plans."""
