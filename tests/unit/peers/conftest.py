"""The mini engines of the vLLM adapter's tests."""

from tests.unit.adapters.conftest import make_engine

__all__ = ["make_engine"]
