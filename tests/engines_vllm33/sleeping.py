"""Cases in which an engine releases its memory and gets it back with different content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from demo.model import prompt_tokens
from tests.engines_vllm33.cases import LONG, Found, Transfer, case
from tests.engines_vllm33.engine import ANSWER_TOKENS, Engine

Tags = list[str] | None
SLEEPS: dict[str, tuple[int, list[Tags]]] = {
    "level 1": (1, [None]),
    "level 2": (2, [None]),
    "by tag": (1, [["weights"], ["kv_cache"]]),
}
"""For each case, the level of the sleep, and the tags of each call that wakes the engine up."""


@case
def asleep(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Sends the engine to sleep during stores, and then during a load."""
    lab = Engine(model, transfer, enable_sleep_mode=True, **engine)
    asked = _watch(lab)
    lab.note("cold", lab.run([LONG]))
    asked_in = {}
    for number, (name, (level, wakes)) in enumerate(SLEEPS.items()):
        asked.clear()
        # The last stores of this prompt may be in flight when the engine goes to sleep.
        other = prompt_tokens(250, 70 + number)
        lab.run([other], 3)
        lab.llm.sleep(level=level)
        for tags in wakes:
            lab.llm.wake_up(tags)
        asked_in[name] = list(asked)
        lab.note(f"{name}: other", lab.run([other], 3))
        _note_after_waking(lab, name)
    lab.forget()
    loading = lab.add(LONG, ANSWER_TOKENS)
    lab.step()
    state, refused = lab.state(loading), ""
    try:
        lab.llm.sleep()
    except RuntimeError as error:
        refused = str(error)
        lab.step_until(lambda: not lab.scheduler.requests, "the load has ended")
        lab.llm.sleep()
    lab.llm.wake_up()
    # If the core runs in this process, vLLM does not report to `LLM` which requests the sleep's pause has aborted. So
    # this aborts the request.
    lab.abort(loading)
    _note_after_waking(lab, "in a load")
    return lab.end(asked=asked_in, state=state, refused=refused)


@case
def asleep_apart(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Sends an engine to sleep during a load. The engine's core has its own process."""
    lab = Engine(model, transfer, enable_sleep_mode=True, **engine)
    lab.llm.collective_rpc("let_sleeps_overwrite_kv")
    lab.note("cold", lab.run([LONG]))
    for number in range(3):
        lab.forget()
        loading = lab.add(LONG, ANSWER_TOKENS)
        for _ in range(3):
            # The core makes steps between these calls, so the load begins.
            assert not lab.llm.llm_engine.is_sleeping()
        lab.llm.sleep()
        lab.llm.wake_up()
        lab.step_until(lambda name=loading: lab.requests[name].ended, "the request was aborted")  # type: ignore[misc]
        _note_after_waking(lab, f"sleep {number}")
    return lab.end()


@case
def released(model: str, transfer: Transfer = None, **engine: Any) -> Found:
    """Makes the engine release its KV memory and get it back. The weights stay in memory."""
    lab = Engine(model, transfer, enable_sleep_mode=True, **engine)
    asked = _watch(lab)
    lab.note("cold", lab.run([LONG]))
    lab.drain()
    lab.llm.sleep(level=0)
    lab.llm.release_kv_cache_memory()
    lab.llm.wake_up(["kv_cache"])
    lab.llm.wake_up(["scheduling"])
    asked_in = {"release": list(asked)}
    _note_after_waking(lab, "release")
    return lab.end(asked=asked_in)


def _watch(lab: Engine) -> list[str]:
    """Begins to record the calls of the allocator and of the connector. Returns the list to which the records are
    added."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    lab.llm.collective_rpc("let_sleeps_overwrite_kv")
    asked: list[str] = CuMemAllocator.get_instance().asked
    if has_kv_transfer_group():
        _record(get_kv_transfer_group(), asked, "unregister_kv_caches", "restore_kv_caches")
        _record(lab.scheduler.connector, asked, "reset_cache", "set_xfer_handshake_metadata")
    return asked


def _record(target: Any, calls: list[str], *names: str) -> None:
    def recorded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        return call

    for name in names:
        setattr(target, name, recorded(name, getattr(target, name)))


def _note_after_waking(lab: Engine, name: str) -> None:
    """Runs a prompt twice and notes the answers. The first time it is computed, because the reset before a sleep also
    drops flexkv's pages. The second time it is a hit.
    """
    lab.note(f"{name}: computed", lab.run([LONG]))
    lab.forget()
    lab.note(f"{name}: hit", lab.run([LONG]))
