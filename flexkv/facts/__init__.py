"""Plain records that several packages share; they import no package with behaviour."""
