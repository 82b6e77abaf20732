"""The control plane: keys, index, slot pools, policy, planner, manager. No bytes, no torch, no I/O; deterministic."""
