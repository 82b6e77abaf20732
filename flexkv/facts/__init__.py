"""Plain records that several packages share."""
