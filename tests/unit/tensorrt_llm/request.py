"""A request of the stand-in executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Request:
    """A request with the attributes that a connector reads, and with the executor's own state."""

    request_id: int
    tokens: list[int]
    new_tokens: int = 2
    cache_salt_id: int | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: Any = None
    blocks: list[int] = field(default_factory=list)
    state: str = "context"
    position: int = 0
    matched: int = 0
    prompt: int = 0
    told_blocks: int = 0
    told_tokens: int = 0
    told: bool = False

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def secret(self) -> int:
        return (
            7919 * (self.cache_salt_id or 0)
            + sum((self.cache_salt or "").encode())
            + 104729 * (self.lora_task_id or 0)
        )

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)
