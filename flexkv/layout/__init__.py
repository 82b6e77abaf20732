"""How each engine's KV pool lowers to one view: handlers build views and check geometry, and do nothing else."""
