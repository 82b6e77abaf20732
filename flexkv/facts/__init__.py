"""Plain facts that several packages speak of: they import nothing that acts."""
