"""Where pages lie: one package a tier, each behind `flexkv.cache.tier`; `factory` makes a unit's list of them."""
