"""Mocks CUDA before torch is imported. Python imports this module when a process of an engine starts."""

import tests.engines_vllm33.mock  # noqa: F401
