"""The tiers that hold pages: one package each behind `contract`; `factory` lists the tiers of a unit."""
