"""The control plane: keys, index, slot pools, eviction, store planners and the manager. It is deterministic, moves no
bytes, does no I/O and does not import torch."""
