"""flexkv: keeps an inference engine's KV cache in host memory and brings it back as one verified transfer graph."""

__version__ = "0.1.0"
