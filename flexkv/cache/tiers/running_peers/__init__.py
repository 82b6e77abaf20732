"""Pages of units that run on this machine beside this one: in their host pools, and in their folders."""
