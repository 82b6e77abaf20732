"""flexkv as SGLang's linker, with Mooncake Store as its remote tier. An engine's lookup waits for the store, and gets
hits on pages that the previous engine stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.sglang_process import PAGE_TOKENS, SglangProcess, linker
from tests.engines_sglang.asked import Asked, whole
from tests.engines_sglang.conftest import Judge
from tests.engines_sglang.metrics_page import flexkv_series, series
from tests.servers.mooncake import Master, mooncake
from tests.servers.namespace import Namespace, network_namespace

UNIT = "dp0.pp0of1.tp0of1"
WAIT_S = 30.0
"""Time limit, in seconds, for waits on the store. It is generous, because the machine may be busy."""
WRITTEN_S = 60.0
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "SGLANG_HOST_IP": "127.0.0.1"}
"""Environment of the engines: they use loopback, the only network interface of the namespace."""
NAMES = ("a", "b")
PAGES = sum(whole(name) for name in NAMES) // PAGE_TOKENS
WRITTEN = series("flexkv_remote_pages_total", direction="write", unit=UNIT)
READ = series("flexkv_remote_pages_total", direction="read", unit=UNIT)
HITS = series("flexkv_hit_blocks_total", tier="remote", unit=UNIT)


class InNamespace(SglangProcess):
    """An engine in a network namespace. It is not forked from the template, which runs outside the namespace."""

    launched = SglangProcess.launched

    def __init__(self, namespace: Namespace, model: Path, log: Path, arguments: Mapping[str, Any]) -> None:
        self._namespace = namespace
        super().__init__(model, log, arguments, **LOOPBACK)

    def placed(self, command: Sequence[str]) -> Sequence[str]:
        return self._namespace.command(command)


class OverMooncake(Asked):
    """An engine whose linker is flexkv, with a store as its remote tier."""

    def __init__(self, engine: SglangProcess) -> None:
        self.engine = engine

    def served(self, answer: dict[str, Any]) -> int:
        return int(answer["host"])

    def forget(self) -> None:
        assert self.engine.call("flush")

    def count(self, *names: Any) -> list[float]:
        page = flexkv_series(self.engine)
        return [page.get(name, 0.0) for name in names]

    def wait_written(self, pages: int) -> None:
        ends_s = time.monotonic() + WRITTEN_S
        while self.count(WRITTEN)[0] < pages:
            assert time.monotonic() < ends_s, f"of {pages} pages {self.count(WRITTEN)} were written"
            time.sleep(0.2)


@contextmanager
def started(namespace: Namespace, master: Master, model: Path, log: Path) -> Iterator[OverMooncake]:
    told = linker(
        host__bytes=48 << 20,
        remote__urls=master.url,
        remote__probe_s=10.0,
        remote__wait_s=WAIT_S,
        load__lookup_wait_s=WAIT_S,
        # The tiny model computes faster than any store can be read. This setting keeps flexkv from computing instead of
        # reading.
        disk__compute_if_faster=False,
    )
    with InNamespace(namespace, model, log, {**told, "enable_metrics": True}) as engine:
        yield OverMooncake(engine)


def test_an_engine_over_mooncake_serves_the_next_one(model: Path, tmp_path: Path, judge: Judge) -> None:
    with network_namespace() as namespace, mooncake(namespace, tmp_path) as (master, _):
        with started(namespace, master, model, tmp_path / "first.log") as first:
            for name in NAMES:
                answer = first.ask_one(name)
                judge(name, answer)
                assert answer["cached"] == 0
            first.wait_written(PAGES)
        with started(namespace, master, model, tmp_path / "second.log") as second:
            # A control: a request with a different salt gets no hit.
            assert second.ask_one("a", cache_salt="a tenant")["cached"] == 0
            for name in NAMES:
                answer = second.ask_one(name)
                judge(name, answer)
                assert second.served(answer) == whole(name)
            ends_s = time.monotonic() + WRITTEN_S
            while (counted := second.count(HITS, READ)) != [PAGES, PAGES]:
                assert time.monotonic() < ends_s, counted
                time.sleep(0.2)
