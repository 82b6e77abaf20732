"""The child process of `SglangProcess`: an SGLang engine in its own virtual environment. It reads commands from one
file descriptor and writes replies to another, as lines of JSON.

python -m demo.sglang_child ORDERS_FD ANSWERS_FD '{"model_path": ..., ...}' spawn|fork
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any


class Operations:
    """The operations that the parent process can ask for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Runs requests together. Each request has the keys `ids` and `tokens`, optionally `custom_params`, and, to
        separate tenants, `extra_key` or `cache_salt`.
        """
        return list(self._run(self._generate_all(requests)))

    def abort(self, request: dict[str, Any], after_tokens: int) -> dict[str, Any]:
        """Runs a request and aborts it after `after_tokens` tokens. If `after_tokens` is 0, aborts the request as soon
        as the engine has received it.
        """
        return dict(self._run(self._abort(request, after_tokens)))

    def flush(self) -> bool:
        """Empties the engine's own cache, which is only possible when the engine is idle. Returns False if it is
        not idle within ten seconds.
        """
        for _ in range(100):
            if self._engine.flush_cache().success:
                return True
            time.sleep(0.1)
        return False

    def update_weights(self, path: str) -> bool:
        """Loads other weights into the running engine. Returns False if the engine's cache cannot be flushed within ten
        seconds.

        Raises:
            RuntimeError: the engine refused the weights; the error contains the engine's message.
        """
        for _ in range(100):
            success, message, *_ = self._engine.update_weights_from_disk(path)
            if success:
                return True
            # The cache can be flushed only when the scheduler is idle. The scheduler removes a batch one step after the
            # engine has sent the batch's last answer, so this tries again.
            if "not flushed" not in message:
                raise RuntimeError(message)
            time.sleep(0.1)
        return False

    def metrics_page(self) -> str:
        """Returns the text that the engine's own server would show at /metrics. The engine needs `enable_metrics`."""
        from fastapi import FastAPI
        from sglang.srt.utils import add_prometheus_middleware
        from starlette.testclient import TestClient

        app = FastAPI()
        add_prometheus_middleware(app)
        return str(TestClient(app).get("/metrics").raise_for_status().text)

    def processor_seconds(self) -> float:
        """Returns the CPU seconds (user and system) that all of the engine's processes have used so far."""
        import psutil  # type: ignore[import-untyped]

        mine = psutil.Process()
        times = [process.cpu_times() for process in (mine, *mine.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))

    def _run(self, work: Any) -> Any:
        return self._engine.loop.run_until_complete(asyncio.wait_for(work, 240))

    async def _generate_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(self._generate(request) for request in requests)))

    async def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        start_s = time.perf_counter()
        first_s = None
        last: dict[str, Any] = {}
        async for part in self._stream(request):
            first_s = first_s if first_s is not None else time.perf_counter() - start_s
            last = part
        return _answer(last, first_s)

    async def _abort(self, request: dict[str, Any], after_tokens: int) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer_manager
        last: dict[str, Any] = {}
        rid = uuid.uuid4().hex
        at_once = asyncio.create_task(self._abort_when_sent(rid)) if after_tokens == 0 else None
        async for last in self._stream(request, rid):
            if at_once is None and last["meta_info"]["completion_tokens"] >= after_tokens:
                tokenizer.abort_request(rid=rid)
        if at_once is not None:
            await at_once
        return _answer(last, None)

    async def _abort_when_sent(self, rid: str) -> None:
        tokenizer = self._engine.tokenizer_manager
        while rid not in tokenizer.rid_to_state:
            await asyncio.sleep(0)
        tokenizer.abort_request(rid=rid)

    def _stream(self, request: dict[str, Any], rid: str | None = None) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(
            rid=rid,
            input_ids=request["ids"],
            sampling_params={
                "max_new_tokens": request["tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "custom_params": request.get("custom_params"),
            },
            return_logprob=True,
            stream=True,
            extra_key=request.get("extra_key"),
            cache_salt=request.get("cache_salt"),
        )
        return self._engine.tokenizer_manager.generate_request(asked, None)


def _answer(last: dict[str, Any], ttft_s: float | None) -> dict[str, Any]:
    about = last["meta_info"]
    details = about.get("cached_tokens_details") or {}
    return {
        # A request that was aborted before its first token has neither tokens nor log probabilities.
        "tokens": last.get("output_ids", []),
        "logprobs": [entry[0] for entry in about.get("output_token_logprobs") or ()],
        "device": details.get("device", 0) if about.get("cached_tokens") else 0,
        "host": sum(count for kind, count in details.items() if kind != "device" and isinstance(count, int)),
        "cached": about.get("cached_tokens", 0),
        "finish": about["finish_reason"]["type"],
        "ttft_s": ttft_s,
    }


def _set_start_method(call: Callable[..., None], method: str, *_asked: Any, **_options: Any) -> None:
    call(method, force=True)


def main() -> None:
    orders, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:3], ("r", "w"), strict=True))
    import sglang

    # SGLang calls set_start_method("spawn") when it starts. The replacement below uses the method from the command
    # line.
    multiprocessing.set_start_method = partial(
        _set_start_method, multiprocessing.set_start_method, sys.argv[4]
    )
    engine = sglang.Engine(**json.loads(sys.argv[3]))
    operations = Operations(engine)
    print(json.dumps({"value": os.getpid()}), file=answers, flush=True)
    for line in orders:
        order = json.loads(line)
        if order["name"] == "close":
            break
        try:
            reply = {"value": getattr(operations, order["name"])(**order["arguments"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
    engine.shutdown()
    # The engine's other processes have ended. A regular exit of the interpreter would take another three seconds of CPU
    # time.
    os._exit(0)


if __name__ == "__main__":
    main()
