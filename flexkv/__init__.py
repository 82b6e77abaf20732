"""flexkv: keeps an inference engine's KV cache in host memory and brings it back as one verified transfer graph."""

from flexkv.native_core import check_native_core

__version__ = "0.1.0"

check_native_core()
