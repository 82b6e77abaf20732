"""Importing this makes the CPU pass for a GPU in this process: torch, vLLM's compiled operators, its drivers.

No file is changed. vLLM's Python runs unchanged except for what `mock_vllm.py` names. The mock cannot show: streams and
events (all work ends as soon as it begins), CUDA graphs, real kernels and their numerics, device pointers (flexkv takes
its CPU lane), and times.
"""

from tests.engines_vllm33 import mock_cuda, mock_operators, mock_vllm

mock_vllm.replace_when_imported()
mock_cuda.replace_torch()
mock_operators.register()
mock_vllm.replace_drivers()
mock_vllm.replace_now()
