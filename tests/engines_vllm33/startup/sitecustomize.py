"""Python imports this at the start of every process of an engine: CUDA is mocked before torch is imported."""

import tests.engines_vllm33.mock  # noqa: F401
