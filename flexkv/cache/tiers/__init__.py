"""Where pages lie: one package per tier behind `contract`; `factory` makes the list of a unit's tiers."""
