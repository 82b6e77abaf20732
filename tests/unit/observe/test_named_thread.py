"""The operating system shows flexkv's threads with their names."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexkv.observe import NamedThread, name_this_thread

ROOT = Path(__file__).resolve().parents[3]


def system_name() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()


def test_the_system_shows_the_name_and_the_starting_thread_keeps_its_own() -> None:
    seen: list[str] = []
    mine = system_name()
    thread = NamedThread("flexkv-peers", lambda *given: seen.extend([system_name(), *given]), ("given",))
    thread.start()
    thread.join(60)
    assert seen == ["flexkv-peers", "given"]
    assert thread.daemon
    assert system_name() == mine


def test_a_pools_threads_have_it_too() -> None:
    with ThreadPoolExecutor(1, initializer=name_this_thread, initargs=("flexkv-scan",)) as pool:
        assert pool.submit(system_name).result(60) == "flexkv-scan"


@pytest.mark.parametrize("name", ["flexkv-longer-than-kept", "other"])
def test_a_name_that_would_not_be_found_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        NamedThread(name, print)


def test_the_package_starts_no_other_threads() -> None:
    """All threads of the package have names. Threads of the benchmarks are an exception, because they end with the
    benchmark."""
    unnamed = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "flexkv").rglob("*.py")
        if re.search(r"\bThread\(|\bTimer\(|ThreadPoolExecutor\((?!.*name_this_thread)", path.read_text())
    }
    assert unnamed == {"flexkv/cli/bench/bare_reads.py", "flexkv/cli/bench/torch_baseline.py"}
