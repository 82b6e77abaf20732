"""Python imports this as it starts, in every process of an engine: CUDA is there before torch is looked at."""

import tests.engines_vllm33.mock  # noqa: F401
