"""Within an engine's namespace, that of one request: vLLM's hashes name an adapter and not what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.adapters.common.lora_names import LoraNames
from flexkv.cache.keys import namespace_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestNamespaces:
    """Namespaces of requests: the engine's, and for requests with an adapter one for its content.

    Args:
        engine: 32 bytes; see `engine_namespace`.
    """

    def __init__(self, engine: bytes) -> None:
        self._engine = engine
        self._loras = LoraNames()
        self._made: dict[str, bytes] = {}

    def of(self, request: Request) -> bytes:
        """32 bytes. Reads the adapter's files where they are new, or have changed."""
        adapter = request.lora_request
        if adapter is None:
            return self._engine
        name = self._loras.name(adapter.lora_path)
        if (made := self._made.get(name)) is None:
            made = self._made[name] = namespace_digest({"engine": self._engine, "adapter": name})
        return made
