"""Python imports this module when a process of an engine starts, so that CUDA is mocked before torch is imported."""

import tests.engines_vllm33.mock  # noqa: F401
