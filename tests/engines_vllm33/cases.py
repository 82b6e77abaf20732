"""What one engine does in a test: each case starts it in this process, and returns its answers.

`transfer` is vLLM's `kv_transfer_config`, None to run without flexkv. Every case returns a `Phases` as "phases".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from demo.model import prompt_tokens
from tests.engines_vllm33.engine import Engine, Request

Transfer = Mapping[str, Any] | None
Found = dict[str, Any]
Case = Callable[..., Found]

CASES: dict[str, Case] = {}

SHORT, SHORTER, LONG = prompt_tokens(150, 1), prompt_tokens(70, 2), prompt_tokens(330, 3)
PROMPTS = [SHORT, SHORTER, LONG]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Phases:
    """Answers by the name of their phase, ready for JSON."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add(self, name: str, answers: Sequence[Request]) -> None:
        self.found[name] = {
            "tokens": [answer.tokens for answer in answers],
            "cached": [answer.cached for answer in answers],
        }


@case
def served(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Computed, served by vLLM's own prefix cache, by flexkv one by one, and by flexkv all at once."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("cold", lab.run_each(PROMPTS))
    lab.drain()
    phases.add("own", lab.run_each(PROMPTS))
    lab.forget()
    phases.add("hit", lab.run_each(PROMPTS))
    lab.forget()
    phases.add("together", lab.run(PROMPTS))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def crowd(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Ten requests at once, longer than a step's budget, with the same first 200 tokens."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    shared = prompt_tokens(200, 4)
    prompts = [shared + prompt_tokens(40 + 37 * number, 10 + number) for number in range(10)]
    phases.add("cold", lab.run(prompts, 5))
    lab.forget()
    phases.add("hit", lab.run(prompts, 5))
    lab.forget()
    phases.add("backwards", lab.run(prompts[::-1], 5))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def evicted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Nothing is dropped on purpose: a pool for fewer than two prompts evicts the others."""
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512, "max_num_batched_tokens": 256}
    lab, phases = Engine(model, transfer, **(small | engine)), Phases()
    prompts = [prompt_tokens(200 + number, 30 + number) for number in range(8)]
    for phase in ("cold", "again"):
        phases.add(phase, lab.run_each(prompts, 4))
        lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def aborted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """A request that flexkv serves is aborted before its first step and after one, two and three; then it is sent
    again."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("cold", lab.run([LONG]))
    states = []
    for steps in range(4):
        lab.forget()
        name = lab.add(LONG, 6)
        for _ in range(steps):
            lab.step()
        # The core appends characters of its own to a request's name.
        left = [request for key, request in lab.scheduler.requests.items() if key.startswith(name)]
        states.append(left[0].status.name if left else "")
        lab.abort(name)
        lab.drain()
        assert not lab.scheduler.requests
    lab.forget()
    phases.add("hit", lab.run([LONG]))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "states": states, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def preempted(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Five requests outgrow a pool that has room for three of them."""
    small = {"num_gpu_blocks_override": 32, "max_model_len": 256}
    lab, phases = Engine(model, transfer, **(small | engine)), Phases()
    prompts = [prompt_tokens(120 + 5 * number, 50 + number) for number in range(5)]
    for phase in ("first", "again"):
        phases.add(phase, lab.run(prompts, 40))
        lab.forget()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


Tags = list[str] | None
SLEEPS: dict[str, tuple[int, list[Tags]]] = {
    "level 1": (1, [None]),
    "level 2": (2, [None]),
    "by tag": (1, [["weights"], ["kv_cache"]]),
}
"""The level of each sleep, and the tags of each call that wakes from it."""


@case
def asleep(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Sleeps and wakes right after stores were ordered; the memory comes back with other content."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    lab, phases = Engine(model, transfer, enable_sleep_mode=True, **engine), Phases()
    allocator = CuMemAllocator.get_instance()
    allocator.kv_caches = lab.kv_tensors()
    if has_kv_transfer_group():
        _record(get_kv_transfer_group(), allocator.asked, "unregister_kv_caches", "restore_kv_caches")
        _record(lab.scheduler.connector, allocator.asked, "reset_cache", "set_xfer_handshake_metadata")
    phases.add("cold", lab.run([LONG]))
    asked = {}
    for number, (name, (level, wakes)) in enumerate(SLEEPS.items()):
        allocator.asked.clear()
        lab.run([prompt_tokens(250, 70 + number)], 3)
        lab.drain()
        lab.llm.sleep(level=level)
        for tags in wakes:
            lab.llm.wake_up(tags)
        asked[name] = list(allocator.asked)
        # The reset that comes before a sleep dropped flexkv's pages too.
        phases.add(f"{name}: computed", lab.run([LONG]))
        lab.forget()
        phases.add(f"{name}: hit", lab.run([LONG]))
        lab.drain()
    found = {**lab.facts(), "phases": phases.found, "asked": asked, "metrics": lab.metrics()}
    lab.close()
    return found


def _record(target: Any, calls: list[str], *names: str) -> None:
    def recorded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        return call

    for name in names:
        setattr(target, name, recorded(name, getattr(target, name)))


@case
def turns(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Two turns of conversations: generated tokens, drafted or not, are stored and served."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    prompts = [prompt_tokens(30, 60) * 5, prompt_tokens(20, 61) * 9, SHORT]
    first = lab.run(prompts, 40)
    phases.add("first", first)
    lab.forget()
    answers = zip(prompts, first, strict=True)
    longer = [[*ids, *answer.tokens, *prompt_tokens(7, 62)] for ids, answer in answers]
    phases.add("second", lab.run_each(longer, 6))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def deferred(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """The connector learns of an allocation when the output of the step is taken. vLLM 0.33 does so for HiSparse alone;
    here the test sets its switches."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    lab.scheduler.defer_block_free = lab.scheduler.defer_async_loads = True
    phases.add("cold", lab.run([LONG]))
    phases.add("other", lab.run([SHORTER], 24))
    lab.forget()
    callers = []
    if lab.scheduler.connector is not None:
        real = lab.scheduler.connector.update_state_after_alloc

        def watched(request: Any, blocks: Any, tokens: int) -> Any:
            if tokens:
                callers.append(sys._getframe(1).f_code.co_name)
            return real(request, blocks, tokens)

        lab.scheduler.connector.update_state_after_alloc = watched
    running = lab.add(SHORTER, 24)
    lab.step_until(lambda: len(lab.requests[running].tokens) > 3, "the first request runs")
    waiting = lab.add(LONG, 6)
    lab.step_until(lambda: lab.requests[running].ended and lab.requests[waiting].ended)
    phases.add("beside", [lab.requests.pop(running)])
    phases.add("hit", [lab.requests.pop(waiting)])
    lab.forget()
    phases.add("again", lab.run([LONG]))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "callers": callers, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def apart(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Scheduler and worker in their own processes, as vLLM starts them by default."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("cold", lab.run_each(PROMPTS))
    for phase in ("hit", "together"):
        # Fails while blocks are held: the last stores are under way.
        lab.step_until_reset()
        phases.add(phase, lab.run_each(PROMPTS) if phase == "hit" else lab.run(PROMPTS))
    found = {"phases": phases.found, "client": type(lab.llm.llm_engine.engine_core).__name__}
    lab.close()
    return found


@case
def from_disk(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """One life of an engine: the same prompts each time."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("asked", lab.run_each(PROMPTS))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def failed(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Loads fail; then the same prompts are sent again, including those stored meanwhile."""
    lab, phases = Engine(model, transfer, **engine), Phases()
    phases.add("cold", lab.run_each([LONG[:170], LONG]))
    lab.forget()
    phases.add("failed", lab.run([LONG]))
    lab.forget()
    phases.add("after", lab.run([LONG]))
    lab.drain()
    found = {**lab.facts(), "phases": phases.found, "metrics": lab.metrics()}
    lab.close()
    return found


@case
def names(model: str, transfer: Transfer = None) -> Found:
    """Without an engine: vLLM's names that the adapter touches and this version lacks, and its calls to a connector."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from build_support.vllm_names import missing, touched
    from flexkv.adapters.vllm.connector import FlexKVConnector
    from tests.unit.adapters.vllm_interface import ADDED_IN_0_33, COMMON, misfits, public_hooks

    return {
        "version": vllm.__version__,
        "missing": missing(touched()),
        "control": missing(["vllm:NoSuchName"]),
        "hooks": public_hooks(KVConnectorBase_V1),
        "misfits": misfits(FlexKVConnector, COMMON | ADDED_IN_0_33),
    }
