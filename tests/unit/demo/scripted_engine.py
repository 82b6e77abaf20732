"""An engine that replaces vLLM in the demo's tests, and computes its answers by a simple rule. A test can make it give
a wrong token, or serve fewer tokens than it found.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from demo.conversation import LOAD_SECONDS, LOADED_BYTES, SERVED_TOKENS, STORED_BYTES

BYTES_A_TOKEN = 1000


class ScriptedEngine:
    """An engine whose answer depends only on the prompt. If it has a connector, it remembers all prompts, and saves
    them in the disk tier's folder when it is closed.

    Tests replace `spoil`, which changes the answers of the engine with a connector, and `serve`, which takes the number
    of tokens found and returns how many of them are served.
    """

    spoil: Callable[[list[int]], list[int]] = staticmethod(lambda answer: answer)
    serve: Callable[[int], int] = staticmethod(lambda tokens: tokens)

    def __init__(self, engine: Mapping[str, Any], log: Path, **others: Any) -> None:
        self._connector = "kv_transfer_config" in engine
        self._stored: list[list[int]] = []
        if self._connector:
            folder = engine["kv_transfer_config"]["kv_connector_extra_config"]["disk.folders"]
            self._file = Path(folder) / "prompts.json"
            if self._file.exists():
                self._stored = json.loads(self._file.read_text())
        self._values = {SERVED_TOKENS: 0.0, LOADED_BYTES: 0.0, STORED_BYTES: 0.0, LOAD_SECONDS: 0.0}

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def close(self) -> None:
        if self._connector:
            self._file.write_text(json.dumps(self._stored))

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._answer(request["ids"], request["max_tokens"]) for request in requests]

    def _answer(self, prompt: list[int], count: int) -> dict[str, Any]:
        answer = [zlib.crc32(repr((prompt, n)).encode()) % 1000 for n in range(count)]
        if self._connector:
            answer = type(self).spoil(answer)
            found = max((common(prompt, known) for known in self._stored), default=0)
            served = type(self).serve(min(found, len(prompt) - 1))
            self._values[SERVED_TOKENS] += served
            self._values[LOADED_BYTES] += BYTES_A_TOKEN * served
            self._values[LOAD_SECONDS] += 1e-6 * served
            self._values[STORED_BYTES] += BYTES_A_TOKEN * (len(prompt) - served)
            self._stored.append(prompt)
        return {"tokens": answer, "ttft_s": 0.001}

    def call(self, operation: str) -> dict[str, Any]:
        return {}

    def metrics(self) -> dict[str, float]:
        return dict(self._values)


def common(one: list[int], other: list[int]) -> int:
    """Returns the length of the common prefix of two prompts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
