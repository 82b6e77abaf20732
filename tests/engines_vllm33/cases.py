"""The cases that tests run. Each case starts an engine in this process, and returns the engine's answers.

The argument `transfer` is vLLM's `kv_transfer_config`, or None to run without flexkv. Cases with sleep mode are in
`sleeping.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from demo.model import prompt_tokens
from tests.engines_vllm33.engine import ANSWER_TOKENS, Engine, Request

Transfer = Mapping[str, Any] | None
Found = dict[str, Any]
Case = Callable[..., Found]

CASES: dict[str, Case] = {}

SHORT, SHORTER, LONG = prompt_tokens(150, 1), prompt_tokens(70, 2), prompt_tokens(330, 3)
PROMPTS = [SHORT, SHORTER, LONG]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def served(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Computes prompts, then sends them again: first they are hits in vLLM's own prefix cache, then hits in flexkv.
    Sends them one by one, and all at once."""
    lab = Engine(model, transfer, **engine)
    lab.note("cold", lab.run_each(PROMPTS))
    lab.drain()
    lab.note("own", lab.run_each(PROMPTS))
    lab.forget()
    lab.note("hit", lab.run_each(PROMPTS))
    lab.forget()
    lab.note("together", lab.run(PROMPTS))
    return lab.end()


@case
def crowd(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs ten requests at once. They share their first 200 tokens, and together exceed the token budget of a step."""
    lab = Engine(model, transfer, **engine)
    shared = prompt_tokens(200, 4)
    prompts = [shared + prompt_tokens(40 + 37 * number, 10 + number) for number in range(10)]
    lab.note("cold", lab.run(prompts, 5))
    lab.forget()
    lab.note("hit", lab.run(prompts, 5))
    lab.forget()
    lab.note("backwards", lab.run(prompts[::-1], 5))
    return lab.end()


@case
def evicted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs prompts without a reset of vLLM's prefix cache. The pool is too small for all of them, so vLLM evicts
    some."""
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512, "max_num_batched_tokens": 256}
    lab = Engine(model, transfer, **(small | engine))
    prompts = [prompt_tokens(200 + number, 30 + number) for number in range(8)]
    for phase in ("cold", "again"):
        lab.note(phase, lab.run_each(prompts))
        lab.drain()
    return lab.end()


@case
def aborted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Aborts a request with a hit in flexkv after zero, one, two and three steps. Each time, sends the request
    again."""
    lab = Engine(model, transfer, **engine)
    lab.note("cold", lab.run([LONG]))
    states = []
    for steps in range(4):
        lab.forget()
        name = lab.add(LONG, ANSWER_TOKENS)
        for _ in range(steps):
            lab.step()
        states.append(lab.state(name))
        lab.abort(name)
        lab.drain()
        assert not lab.scheduler.requests
    lab.forget()
    lab.note("hit", lab.run([LONG]))
    return lab.end(states=states)


@case
def preempted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs three requests, so that vLLM preempts some of them. Their prompts fit into the pool, but not all tokens that
    they generate."""
    small = {"num_gpu_blocks_override": 28, "max_model_len": 256}
    lab = Engine(model, transfer, **(small | engine))
    prompts = [prompt_tokens(121 + 5 * number, 50 + number) for number in range(3)]
    for phase in ("first", "again"):
        lab.note(phase, lab.run(prompts, 24))
        lab.forget()
    return lab.end()


@case
def turns(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs conversations of two turns. Tokens that were generated in the first turn are stored, drafted or not, and are
    hits in the second turn.
    """
    lab = Engine(model, transfer, **engine)
    prompts = [prompt_tokens(30, 60) * 5, prompt_tokens(20, 61) * 9, SHORT]
    first = lab.run(prompts, 32)
    lab.note("first", first)
    lab.forget()
    answers = zip(prompts, first, strict=True)
    longer = [[*ids, *answer.tokens, *prompt_tokens(7, 62)] for ids, answer in answers]
    lab.note("second", lab.run_each(longer))
    return lab.end()


@case
def deferred(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs requests while vLLM defers allocations and frees. It then notifies the connector of an allocation only when
    it processes the step's output. It frees the blocks of a finished request only when no step in flight uses them. A
    second part aborts a request between its allocation and its load.

    vLLM 0.33 defers them only for HiSparse, so the case sets the scheduler's switches itself.
    """
    lab = Engine(model, transfer, **engine)
    scheduler = lab.scheduler
    scheduler.defer_block_free = scheduler.defer_async_loads = True
    lab.note("cold", lab.run([LONG]))
    lab.note("other", lab.run([SHORTER], 12))
    lab.forget()
    callers: list[str] = []
    frees: list[int] = []
    drain_frees = scheduler._drain_deferred_frees

    def watched_frees() -> None:
        frees.append(len(scheduler.deferred_frees))
        drain_frees()

    scheduler._drain_deferred_frees = watched_frees
    if scheduler.connector is not None:
        real = scheduler.connector.update_state_after_alloc

        def watched(request: Any, blocks: Any, tokens: int) -> Any:
            if tokens:
                callers.append(sys._getframe(1).f_code.co_name)
            return real(request, blocks, tokens)

        scheduler.connector.update_state_after_alloc = watched

    def beside_another() -> list[Request]:
        """Runs a request, and adds `LONG` while it runs. Returns the answers to the two requests."""
        running = lab.add(SHORTER, 12)
        lab.step_until(lambda: len(lab.requests[running].tokens) > 3, "the first request runs")
        waiting = lab.add(LONG, ANSWER_TOKENS)
        lab.step_until(lambda: lab.requests[running].ended and lab.requests[waiting].ended)
        return [lab.requests.pop(running), lab.requests.pop(waiting)]

    beside, hit = beside_another()
    lab.note("beside", [beside])
    lab.note("hit", [hit])
    lab.forget()
    aborted: list[str] = []
    update = scheduler.update_from_output

    def abort_first(*arguments: Any) -> Any:
        """Aborts a request at the point where the core processes aborts of its clients: after a step, before the step's
        output is processed.
        """
        if scheduler.deferred_loads and not aborted:
            aborted.extend(scheduler.deferred_loads)
            lab.core.abort_requests(list(scheduler.deferred_loads))
        return update(*arguments)

    scheduler.update_from_output = abort_first
    running = lab.add(SHORTER, 12)
    lab.step_until(lambda: len(lab.requests[running].tokens) > 3, "the first request runs")
    waiting = lab.add(LONG, ANSWER_TOKENS)
    lab.step_until(lambda: lab.requests[running].ended)
    lab.note("beside the aborted one", [lab.requests.pop(running)])
    lab.abort(waiting)
    lab.forget()
    assert not scheduler.requests
    lab.note("again", lab.run([LONG]))
    return lab.end(callers=callers, most_deferred_frees=max(frees, default=0), aborted=len(aborted))


@case
def apart(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Runs prompts on an engine whose scheduler and workers have their own processes, as by default in vLLM."""
    lab = Engine(model, transfer, **engine)
    lab.note("cold", lab.run_each(PROMPTS))
    lab.forget()
    lab.note("hit", lab.run_each(PROMPTS))
    lab.forget()
    lab.note("together", lab.run(PROMPTS))
    return lab.end()


@case
def from_disk(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Starts an engine once and sends the prompts. A test runs this case several times with one folder on disk."""
    lab = Engine(model, transfer, **engine)
    lab.note("asked", lab.run_each(PROMPTS))
    return lab.end()


@case
def failed(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Lets the load of a prompt's first blocks fail. Then sends the prompt again, which gets hits on the blocks that
    were computed and stored after the failure.
    """
    lab = Engine(model, transfer, **engine)
    lab.note("beginning", lab.run([LONG[:170]]))
    lab.forget()
    lab.note("failed", lab.run([LONG]))
    lab.forget()
    lab.note("after", lab.run([LONG]))
    return lab.end()


@case
def broken_promise(model: str, transfer: Transfer = None, knows_runner: bool = True, **engine: Any) -> Found:
    """Runs a prompt whose first blocks another connector promises and does not load. This connector comes before flexkv
    in a MultiConnector.

    Args:
        knows_runner: False for a control, in which flexkv takes Model Runner V2 for V1.
    """
    from flexkv.adapters.vllm.engine_spec import EngineRole

    of = EngineRole.of

    def role(config: Any) -> EngineRole:
        return of(config) if knows_runner else replace(of(config), keeps_computed=False)

    with patch.object(EngineRole, "of", role):
        lab = Engine(model, transfer, **engine)
    lab.forget()
    lab.note("broken", lab.run([LONG], fields={"promised_tokens": 160}))
    lab.forget()
    lab.note("after", lab.run([LONG]))
    return lab.end()


@case
def announced(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Returns the KV events from the first block until after a reset of vLLM's cache and flexkv's."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    lab = Engine(model, transfer, kv_events_config=events, **engine)
    said: list[dict[str, Any]] = []

    def publish(batch: Any) -> None:
        for event in batch.events:
            said.append(
                {
                    "kind": type(event).__name__,
                    "medium": getattr(event, "medium", None),
                    "hashes": [str(one) for one in getattr(event, "block_hashes", ())],
                    "tokens": list(getattr(event, "token_ids", ())),
                }
            )

    lab.scheduler.kv_event_publisher.publish = publish
    lab.note("cold", lab.run_each(PROMPTS))
    lab.forget()
    lab.note("hit", lab.run_each(PROMPTS))
    lab.drain()
    assert lab.llm.reset_prefix_cache(reset_connector=True)
    lab.note("after the reset", lab.run([SHORTER]))
    return lab.end(events=said)
