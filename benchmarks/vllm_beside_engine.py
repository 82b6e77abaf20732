"""The program of the processes that `vllm_beside_gpu` starts. It runs one vLLM engine with one long request, and with
prompts of other requests at the same time.

The program reads one JSON line per command from standard input, and answers each command with one line on the file
descriptor given as its argument. A step ends when the scheduler, which is in this process, gets a batch's result. A
load or store of flexkv begins when flexkv's transfer engine accepts it, and ends when the transfer engine returns its
result.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.step_times import Copy, Step

RUNNING = "running"
STEP_LIMIT_S = 120.0
"""Seconds after which a wait for tokens fails."""
RUNNING_PROMPT = 512
"""Number of tokens of the running request's prompt."""
FIRST_STEPS = 20
"""Number of steps at the start of the running request that are not counted."""
TAIL_STEPS = 24
"""Number of steps that are run after another request has ended. The pages of that request are still being stored in the
first of these steps; in the others, the running request is alone.
"""
RENEWED_TOKENS = 2000
"""Number of tokens after which the running request is replaced by a new one, because a step takes longer the more
tokens it attends to.
"""


class Trace:
    """Records the steps of the running request, and the loads and stores of flexkv."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.copies: list[Copy] = []
        self._last_s: float | None = None
        self._launched, self._adding_s, self._connector_s = 0, 0.0, 0.0
        self._in_connector = False
        self._open: dict[int, tuple[str, float, int]] = {}
        self.lanes: dict[int, Any] = {}

    def watch_scheduler(self, scheduler: Any) -> None:
        """Records a step for each batch that contains the running request."""
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def others(batch: Any) -> int:
            scheduled = batch.num_scheduled_tokens
            return int(sum(count for name, count in scheduled.items() if not name.startswith(RUNNING)))

        def watched_schedule(*rest: Any, **named: Any) -> Any:
            batch = schedule(*rest, **named)
            self._launched = max(self._launched, others(batch))
            return batch

        def watched_update(batch: Any, output: Any) -> Any:
            now_s = time.perf_counter()
            scheduled = batch.num_scheduled_tokens
            if any(name.startswith(RUNNING) for name in scheduled):
                if self._last_s is not None:
                    self.steps.append(
                        Step(
                            self._last_s,
                            now_s,
                            others(batch),
                            len(scheduled),
                            self._launched,
                            self._adding_s,
                            self._connector_s,
                        )
                    )
                self._begin_step(now_s)
            return update(batch, output)

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update

    def added(self, seconds: float) -> None:
        """Excludes from the current step `seconds` that were spent on adding a request."""
        self._adding_s += seconds

    def forget(self) -> None:
        """Drops the recorded steps and copies, and begins a new measurement window."""
        self.steps, self.copies = [], []
        self.break_step()

    def break_step(self) -> None:
        """Ends the current step without recording it. The next step begins at the next token."""
        self._begin_step(None)

    def _begin_step(self, now_s: float | None) -> None:
        self._last_s, self._launched, self._adding_s, self._connector_s = now_s, 0, 0.0, 0.0

    def watch_connector(self, connector: Any) -> None:
        """Replaces the connector's public methods with timed ones, which add their time to the current step."""
        for name in dir(type(connector)):
            method = getattr(connector, name) if inspect.isfunction(getattr(type(connector), name)) else None
            if method is not None and not name.startswith("_"):
                setattr(connector, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*rest: Any, **named: Any) -> Any:
            if self._in_connector:  # a hook that another hook called is already counted
                return method(*rest, **named)
            self._in_connector, began_s = True, time.perf_counter()
            try:
                return method(*rest, **named)
            finally:
                self._in_connector = False
                self._connector_s += time.perf_counter() - began_s

        return timed

    def watch_flexkv(self) -> None:
        """Makes flexkv's transfer engines record when each load and store is submitted, and when its result is
        returned.
        """
        from flexkv.transfer.engine import TransferEngine
        from flexkv.transfer.graph import OpKind

        kinds = {OpKind.H2D: "load", OpKind.D2H: "store"}
        submit, poll = TransferEngine.submit, TransferEngine.poll

        def watched_submit(engine: Any, graph: Any, *rest: Any, **named: Any) -> Any:
            now_s = time.perf_counter()
            ticket = submit(engine, graph, *rest, **named)
            if ticket is not None:
                self.lanes[id(engine)] = engine
                for op in graph.ops:
                    if op.kind in kinds:
                        self._open[op.op_id] = kinds[op.kind], now_s, op.pages
            return ticket

        def watched_poll(engine: Any, *rest: Any, **named: Any) -> Any:
            results = poll(engine, *rest, **named)
            for result in results:
                if result.op_id in self._open:
                    kind, begin_s, pages = self._open.pop(result.op_id)
                    self.copies.append(Copy(kind, begin_s, time.perf_counter(), pages))
            return results

        setattr(TransferEngine, "submit", watched_submit)  # noqa: B010
        setattr(TransferEngine, "poll", watched_poll)  # noqa: B010

    def copies_so_far(self) -> list[Copy]:
        """Returns the copies so far. For copies in flight, the current time counts as their end."""
        now_s = time.perf_counter()
        return [
            *self.copies,
            *(Copy(kind, begin, now_s, pages) for kind, begin, pages in self._open.values()),
        ]

    def path_bytes(self) -> dict[str, int]:
        """Returns how many bytes the GPU's lanes have copied on each path."""
        moved: dict[str, int] = {}
        for engine in self.lanes.values():
            if engine.cuda_lane is not None:
                for path, _, count, _ in engine.cuda_lane.counts():
                    moved[path] = moved.get(path, 0) + count
        return moved


class Engine:
    """vLLM's engine, which this class drives step by step.

    Args:
        arguments: keyword arguments of `vllm.LLM`.
        vocabulary: size of the vocabulary, from which prompts are drawn.
        flexkv: whether the connector is flexkv's.
    """

    def __init__(self, arguments: dict[str, Any], vocabulary: int, flexkv: bool) -> None:
        self.trace = Trace()
        if flexkv:
            self.trace.watch_flexkv()
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.trace.watch_scheduler(self._scheduler)
        if self._scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.trace.watch_connector(self._scheduler.connector)
            self.trace.watch_connector(get_kv_transfer_group())
        self._vocabulary = vocabulary
        self._running = ""
        self._ended: dict[str, int | None] = {}
        self._tokens = 0
        self._number = 0

    def begin(self) -> None:
        """Ends the running request, if there is one, and starts a new one."""
        self.end()
        self._number += 1
        self._running, self._tokens = f"{RUNNING}-{self._number}", 0
        # The prompt is the same each time, and the engine has it cached, so a restart adds no prefill.
        self._add(self._running, self._prompt(RUNNING_PROMPT, 1), 2 * RENEWED_TOKENS)
        self._more(FIRST_STEPS)
        self.trace.break_step()

    def alone(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps of the running request without any other request, and returns the measurements."""
        self.begin()
        self.trace.forget()
        self._more(steps + 1)
        return self._taken()

    def prompts(self, length: int, streams: list[int], least_steps: int, window_s: float) -> dict[str, Any]:
        """Runs prompts of `length` tokens one after the other while the running request continues, until all prompts
        have ended or the time is over.

        Args:
            streams: numbers of the prompts; equal numbers give equal prompts.
            least_steps: minimum number of steps of the running request. The time limit does not end the window before
                these steps have run.
        """
        ends_s = time.monotonic() + window_s
        self.trace.forget()
        cached: list[int] = []
        ttft_ms: list[float] = []
        for stream in streams:
            self._number += 1
            name = f"other-{self._number}"
            began_s = time.perf_counter()
            prompt = self._prompt(length, stream)
            added_s = time.perf_counter()
            self.trace.added(added_s - began_s)
            self._add(name, prompt, 1)
            self._until(lambda name=name: name in self._ended)  # type: ignore[misc]
            ttft_ms.append(1e3 * (time.perf_counter() - added_s))
            cached.append(self._ended.pop(name) or 0)
            self._more(TAIL_STEPS)
            if self._tokens > RENEWED_TOKENS:
                self.begin()
            if time.monotonic() > ends_s and len(self.trace.steps) >= least_steps:
                break
        return self._taken() | {"cached": cached, "ttft_ms": ttft_ms, "prompts": len(cached)}

    def end(self) -> None:
        """Ends the running request."""
        if self._running:
            self._engine.abort_request([self._running])
            self._running = ""
            self.trace.break_step()

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _taken(self) -> dict[str, Any]:
        return {
            "steps": [asdict(step) for step in self.trace.steps],
            "copies": [asdict(copy) for copy in self.trace.copies_so_far()],
            "path_bytes": self.trace.path_bytes(),
        }

    def _prompt(self, count: int, stream: int) -> list[int]:
        import numpy as np

        drawn = np.random.default_rng([stream, 20]).integers(4, self._vocabulary, size=count)
        return [int(token) for token in drawn]

    def _add(self, name: str, ids: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        self.trace.added(time.perf_counter() - began_s)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id == self._running:
                self._tokens = len(output.outputs[0].token_ids)
            if output.finished:
                self._ended[output.request_id] = output.num_cached_tokens

    def _more(self, steps: int) -> None:
        wanted = self._tokens + steps
        self._until(lambda: self._tokens >= wanted)

    def _until(self, met: Callable[[], bool]) -> None:
        """Runs steps until `met()` is true. Raises RuntimeError if the running request ends, and TimeoutError after
        STEP_LIMIT_S.
        """
        ends_s = time.monotonic() + STEP_LIMIT_S
        while not met():
            if self._running in self._ended:
                raise RuntimeError(f"the running request ended after {self._tokens} tokens")
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not within {STEP_LIMIT_S:.0f} s, after {self._tokens} tokens")
            self._step()


def serve(answers: int) -> None:
    """Runs one command after the other until `close` or the end of standard input."""
    engine: Engine | None = None
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            command = json.loads(line)
            what, arguments = command["op"], command["arguments"]
            began_s = time.monotonic()
            try:
                if what == "start":
                    if prepare := arguments.pop("prepare"):
                        module, _, function = prepare.partition(":")
                        getattr(importlib.import_module(module), function)()
                    engine = Engine(**arguments)
                    answer: dict[str, Any] = {}
                elif engine is None and what == "close":
                    answer = {}
                else:
                    answer = getattr(engine, what)(**arguments) or {}
                answer["ok"] = True
            except Exception as error:
                answer = {"ok": False, "error": repr(error), "trace": traceback.format_exc()[-3000:]}
            answer["seconds"] = time.monotonic() - began_s
            out.write(json.dumps(answer) + "\n")
            out.flush()
            if what == "close":
                return


if __name__ == "__main__":
    serve(int(sys.argv[1]))
