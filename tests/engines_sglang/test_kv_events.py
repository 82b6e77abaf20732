"""KV events of a real SGLang engine with flexkv as its linker. A router that gets only these events can predict which
tokens are hits.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from demo.sglang_process import PAGE_TOKENS
from tests.engines_sglang.asked import FILLERS, whole
from tests.engines_sglang.conftest import PROMPTS, Judge, Parts
from tests.engines_sglang.spied import Spied

HEARD_S = 60.0
SUBSCRIBED_S = 0.5
"""Seconds after the handshake within which the publisher has read the subscription."""
OURS = ("CPU_PINNED", "DISK")
SMALL_HOST_BYTES = 8 << 20
"""Bytes of host memory for about 120 pages of the tiny model."""

Page = dict[str, Any]


class Router:
    """Subscribes to events as SGLang's gateway and Dynamo do, and records which media (device, host memory, disk) have
    each page. It does not compute page hashes: it finds a prompt's pages by their tokens and parents.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")
        self._last = -1
        self.has: dict[str, dict[int, Page]] = {medium: {} for medium in ("GPU", *OURS)}
        self.cleared = 0
        self.removed = dict.fromkeys(self.has, 0)

    def join(self) -> None:
        """Waits until the engine's publisher has this router's subscription. The router would not get events that are
        published earlier.
        """
        assert self._monitor.poll(int(HEARD_S * 1000)), "the engine's publisher was not reached"
        time.sleep(SUBSCRIBED_S)

    def hear_until(self, condition: Callable[[], object], what: str) -> None:
        ends_s = time.monotonic() + HEARD_S
        while not condition():
            assert time.monotonic() < ends_s, (
                f"{what}: { ({name: len(pages) for name, pages in self.has.items()}) }"
            )
            self.hear(100)

    def hear(self, wait_ms: int) -> None:
        if not self._socket.poll(wait_ms):
            return
        _, number, payload = self._socket.recv_multipart()
        # The engine may have published batches before this router subscribed, so the first batch may have any number.
        assert self._last in (-1, int.from_bytes(number, "big") - 1), "a batch was lost"
        self._last = int.from_bytes(number, "big")
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.cleared += 1
                for pages in self.has.values():
                    pages.clear()
            elif event["type"] == "BlockStored":
                self._stored(event)
            else:
                for each in event["block_hashes"]:
                    gone = self.has[event["medium"]].pop(each, None)
                    assert gone is not None or event["medium"] == "GPU", "never announced"
                self.removed[event["medium"]] += len(event["block_hashes"])

    def _stored(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        for at, each in enumerate(event["block_hashes"]):
            page = {"parent": parent, "tokens": event["token_ids"][at * size : (at + 1) * size], "size": size}
            # In SGLang's own format, the pages of requests with different extra keys have the same hashes. So a page
            # may be announced on the device twice.
            assert event["medium"] == "GPU" or each not in self.has[event["medium"]], "announced twice"
            self.has[event["medium"]][each] = page
            parent = each

    def predicted(self, name: str, media: tuple[str, ...] = OURS) -> int:
        """Returns how many tokens of a prompt are on the given media, counted from its first page to the first missing
        page."""
        named = {
            (page["parent"], tuple(page["tokens"])): each
            for medium in media
            for each, page in self.has[medium].items()
        }
        parent = None
        for tokens in range(0, whole(name), PAGE_TOKENS):
            parent = named.get((parent, tuple(PROMPTS[name][tokens : tokens + PAGE_TOKENS])))
            if parent is None:
                return tokens
        return whole(name)

    def has_all(self, name: str, medium: str) -> bool:
        return self.predicted(name, (medium,)) == whole(name)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)


@pytest.fixture
def router() -> Iterator[Router]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    router = Router(port)
    yield router
    router.close()


def test_a_router_predicts_what_is_served(model: Path, tmp_path: Path, router: Router, judge: Judge) -> None:
    """From KV events alone, a router predicts at each step which tokens are hits. This is one test because engines
    start slowly.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    publisher = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{router.port}", "bind": True}
    # An engine that sleeps while it is idle would publish events of the disk only with the next request.
    arguments = {"kv_events_config": json.dumps(publisher), "sleep_on_idle": False}
    settings: dict[str, Any] = {"host__bytes": SMALL_HOST_BYTES, "disk__compute_if_faster": False}
    spied = Spied(model, tmp_path / "engine", disk, arguments, **settings)
    with spied.engine:
        router.join()
        for name in ("a", "b"):
            judge(name, spied.ask_one(name))
            for medium in OURS:
                router.hear_until(partial(router.has_all, name, medium), f"{name} on {medium}")
        # Pages with generated tokens are stored a moment after those of the prompts, so this waits for them.
        on_device = router.has["GPU"]
        router.hear_until(
            lambda: all(router.has[medium].keys() == on_device.keys() for medium in OURS), "all pages"
        )
        for medium in OURS:
            assert router.has[medium], "the words are those of the engine's own events"
            assert {each: on_device.get(each) for each in router.has[medium]} == router.has[medium]

        # In SGLang's own format, another caller's pages have the same hashes, so flexkv does not announce them.
        before = {medium: dict(router.has[medium]) for medium in OURS}
        spied.ask_one("a", extra_key="a tenant")
        spied.settle()
        router.hear(1000)
        assert {medium: router.has[medium] for medium in OURS} == before

        # The other prompts make flexkv evict the pages of "a" from host memory.
        for name in FILLERS:
            judge(name, spied.ask_one(name))
        router.hear_until(lambda: router.predicted("a", ("CPU_PINNED",)) == 0, "its removal from host memory")
        assert router.removed["CPU_PINNED"] >= whole("a") // PAGE_TOKENS
        assert router.predicted("a", ("DISK",)) == whole("a")

        # On a flush, the engine announces that all pages are gone. Then flexkv announces its remaining pages again.
        cleared = router.cleared
        spied.forget()
        router.hear_until(lambda: router.cleared > cleared, "the flush")
        router.hear_until(lambda: router.predicted("a") == whole("a"), "what flexkv kept")
        assert router.predicted("a", ("GPU",)) == 0
        answer = spied.ask_one("a")
        judge("a", answer)
        assert answer["host"] == whole("a"), "as predicted"

        # After a change of the weights, no page remains.
        cleared = router.cleared
        assert spied.engine.call("update_weights", path=str(model))
        router.hear_until(lambda: router.cleared > cleared, "the reset")
        assert router.predicted("a") == 0
        answer = spied.ask_one("a")
        judge("a", answer)
        assert answer["cached"] == 0


# --- SGLang's own tree, without an engine ---

CALLERS = ("nobody", "salt", "adapter", "extra key", "extra key and salt")
UNNAMED = {"extra key", "extra key and salt"}
"""Callers whose pages have the same hashes as those of other callers in SGLang's own format."""


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("form", ["default", "dynamo"])
def test_pages_are_announced_with_the_engines_own_words(parts: Parts, core: str, form: str) -> None:
    """flexkv announces each page in host memory with the same fields as SGLang announces it on the device. Compares,
    for each caller, how many pages are announced on each of the two media, and with which fields.
    """
    left_out = UNNAMED if form == "default" else set()
    expected = {caller: [6, 0 if caller in left_out else 6, True] for caller in CALLERS}
    assert parts["events_child"][f"{core}, {form}"] == expected


def test_pages_of_pairs_of_tokens_are_announced(parts: Parts) -> None:
    assert parts["events_child"]["pairs of tokens"] == {caller: [5, 5, True] for caller in CALLERS}


@pytest.mark.parametrize(("case", "pages"), [("over a file", 4), ("pairs over a file", 3)])
def test_the_next_process_announces_the_same_without_the_session(parts: Parts, case: str, pages: int) -> None:
    assert parts["events_child"][case] == {
        "pages": pages,
        "alike": True,
        "sessions": [["a session"], ["None"]],
    }


def test_control_nodes_that_forget_their_parents_are_seen(parts: Parts) -> None:
    assert parts["events_child"]["control"]["nobody"] == [6, 6, False]


def test_pages_stay_announced_over_a_flush_and_leave_with_eviction_and_new_weights(parts: Parts) -> None:
    assert parts["events_child"]["life"] == {
        "stored": [["cleared"], ["stored", "GPU", 4], ["stored", "CPU_PINNED", 4]],
        "flushed": [["cleared"], ["stored", "CPU_PINNED", 4]],
        "evicted": [["removed", "CPU_PINNED", 1]],
        "new weights": [["cleared"]],
        "no news": [],
    }


def test_ranks_that_share_pages_announce_the_engines_alone(parts: Parts) -> None:
    assert parts["events_child"]["several ranks"] == {"stored": [["cleared"], ["stored", "GPU", 4]]}
