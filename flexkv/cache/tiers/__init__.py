"""The tiers that hold pages. Each is a package that implements `contract`; `factory` lists the tiers of a unit."""
