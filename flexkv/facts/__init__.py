"""Plain records that several packages share; they import nothing that acts."""
