"""Keeps vLLM from compiling the ranks of log probabilities at first use, which takes longer than all the requests."""

from __future__ import annotations

import torch

torch.compiler.set_stance("force_eager")

OPERATIONS: dict[str, object] = {}
"""None: the engine's side imports this module for its side effect."""
