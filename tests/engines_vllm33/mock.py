"""Importing this module makes the CPU look like a GPU in this process: for torch, for vLLM's compiled operators, and
for the drivers that vLLM calls.

The mock changes no file. vLLM's Python code runs unchanged, except for the parts that `mock_vllm.py` replaces. The mock
does not cover streams and events (all work ends at once), CUDA graphs, real kernels and their numerics, device pointers
(flexkv uses its CPU lane), and times.
"""

from tests.engines_vllm33 import mock_cuda, mock_operators, mock_vllm

mock_vllm.replace_when_imported()
mock_cuda.replace_torch()
mock_operators.register()
mock_vllm.replace_drivers()
mock_vllm.replace_now()
