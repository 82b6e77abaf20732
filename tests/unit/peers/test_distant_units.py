"""Units on different machines find each other's pages through files in their disk folders, and load them correctly or
not at all.

In these tests all units run on one machine. Each has its own runtime folder, and claims to run on a machine of its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from flexkv.cli.peers_command import command
from flexkv.peers import distant_units, live_file
from flexkv.peers import machines as machines_module
from flexkv.peers.card import PROTOCOL, SHOWN_DIGITS
from flexkv.peers.live_file import LIVE_NAME, LiveReader
from flexkv.peers.machines import MachineWatch
from flexkv.peers.share import PeerShare
from flexkv.storage.peer_reader import PeerReader
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import (
    PROMPT,
    Make,
    distant_settings,
    knows,
    live_files,
    live_tiers,
    only_live_file,
    share_of,
    wait_for,
)

PAGES = 5
ROOT = Path(__file__).resolve().parents[3]
Serve = Callable[..., int]


@pytest.fixture
def machine(make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MiniEngine]:
    """Returns a function that starts an engine. The engine's unit is on a machine of its own, according to the unit's
    file."""
    numbers = itertools.count()
    monkeypatch.setattr(distant_units, "machine_id", lambda: f"machine {next(numbers)}")
    return lambda name, **more: make_engine(**distant_settings(tmp_path, name) | more)


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.peers.distant_child"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)


@pytest.fixture
def serve(nursery: subprocess.Popen[str], tmp_path: Path) -> Iterator[Serve]:
    """Returns a function that starts a process and returns its process id. The process has a unit on machine `far`,
    which has the prompt's pages."""
    pids = []

    def start(other: str = "same") -> int:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        print(tmp_path, "far", other, file=nursery.stdin, flush=True)
        pids.append(int(nursery.stdout.readline()))
        return pids[-1]

    yield start
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def store(engine: MiniEngine, prompt: list[int] = PROMPT, name: str = "one") -> None:
    engine.run(make_request(prompt, name))
    engine.until(lambda: not engine.unit.busy)


def hits(engine: MiniEngine) -> float:
    return engine.counters.data["flexkv_hit_blocks_total"]["peers"]


def watch_of(engine: MiniEngine) -> MachineWatch:
    distant = share_of(engine)._distant
    assert distant is not None
    assert distant._watch is not None
    return distant._watch


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# --- sharing between machines ---


def test_a_prompt_in_a_folder_of_another_machine_is_a_hit(machine: Any) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    assert other.run(make_request(PROMPT, "two")) == 20  # `run` fails if a number that was loaded is wrong
    assert hits(other) == PAGES
    (row,) = share_of(other).peers()
    assert (row["unit"], row["disk_pages"]) == (share_of(one)._card.unit, PAGES)
    assert row["machine"] != ""
    assert live_tiers(other)[0].gauges() == {"flexkv_peers": 1}


def test_what_was_there_before_and_what_comes_is_found_both_ways(machine: Any) -> None:
    one = machine("a")
    store(one)
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    second = [token + 1000 for token in PROMPT]
    store(other, second, "two")
    wait_for(lambda: knows(one, PAGES))
    assert one.run(make_request(second, "three")) == 20
    third = [token + 2000 for token in PROMPT]
    store(one, third, "four")
    wait_for(lambda: knows(other, 2 * PAGES))
    assert other.run(make_request(third, "five")) == 20


def test_pages_of_two_ranks_and_of_striped_folders(machine: Any, tmp_path: Path) -> None:
    folders = {"disk.folders": f"{tmp_path}/shared/a,{tmp_path}/shared/aa"}
    one = machine("a", ranks=2, **folders)
    other = machine("b", ranks=2)
    store(one)
    wait_for(lambda: knows(other, PAGES))
    assert other.run(make_request(PROMPT, "two")) == 20


def test_control_units_of_one_machine_are_not_followed_by_their_files(
    make_engine: Make, tmp_path: Path
) -> None:
    one, other = (make_engine(**distant_settings(tmp_path, name)) for name in ("a", "b"))
    store(one)
    wait_for(lambda: len(watch_of(other)._units) == 2)
    beats = watch_of(other)._writer._beat
    wait_for(lambda: watch_of(other)._writer._beat > beats + 10)
    assert knows(other, 0)
    assert share_of(other).joined == 0


def test_on_one_machine_the_board_is_the_way(make_engine: Make, tmp_path: Path) -> None:
    run = {"peers.folder": str(tmp_path / "run")}
    one, other = (make_engine(**distant_settings(tmp_path, name) | run) for name in ("a", "b"))
    store(one)
    wait_for(lambda: knows(other, PAGES))
    (row,) = share_of(other).peers()
    assert row["machine"] == ""


def test_pages_that_the_owner_gave_up_are_not_promised(machine: Any) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    keys = one.keys_of(make_request(PROMPT))
    assert one.unit.manager.forget(0, keys[:2]) > 0
    wait_for(lambda: knows(other, PAGES - 2))


def test_a_unit_that_closes_leaves_no_file_and_no_page(machine: Any, tmp_path: Path) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    one.close()
    wait_for(lambda: knows(other, 0))
    assert share_of(other).joined == 0
    other.close()
    wait_for(lambda: live_files(tmp_path) == [])
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "flexkv-machines"])


def test_a_reset_unit_leaves(machine: Any, tmp_path: Path) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    one.unit.manager.reset()
    wait_for(lambda: knows(other, 0))
    wait_for(lambda: len(live_files(tmp_path)) == 1)


def test_the_command_shows_units_of_other_machines(machine: Any, tmp_path: Path) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    shown = CliRunner().invoke(command, ["--folder", str(tmp_path / "b")], terminal_width=200)
    unit = share_of(one)._card.unit[:SHOWN_DIGITS]
    assert f"{os.getpid()} ({unit}) of " in " ".join(shown.output.split())


# --- settings ---


@pytest.mark.parametrize("share", ["disk", "off"])
def test_without_the_setting_there_is_no_thread_and_no_file(
    make_engine: Make, tmp_path: Path, share: str
) -> None:
    settings = distant_settings(tmp_path, "a") | {"peers.share": share, "peers.across_machines": False}
    store(make_engine(**settings))
    assert live_files(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "flexkv-machines"]


@pytest.mark.parametrize("more", [{"peers.share": "off"}, {"disk.folders": ""}])
def test_without_shared_folders_the_setting_is_refused(
    make_engine: Make, tmp_path: Path, more: dict[str, str]
) -> None:
    with pytest.raises(Exception, match=r"peers\.across_machines: true with peers.share"):
        make_engine(**distant_settings(tmp_path, "a") | more)


@pytest.mark.parametrize("beat_s", [0.01, 61, 0, "x"])
def test_an_interval_out_of_bounds_is_refused(make_engine: Make, tmp_path: Path, beat_s: object) -> None:
    with pytest.raises(Exception, match=r"peers\.beat_s"):
        make_engine(**distant_settings(tmp_path, "a") | {"peers.beat_s": beat_s})


def test_folders_in_several_places_are_not_shared_across_machines(
    make_engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = {"disk.folders": f"{tmp_path}/x/a,{tmp_path}/y/a"}
    engine = make_engine(**distant_settings(tmp_path, "a") | folders)
    assert "allowed is one folder in which all of them lie" in caplog.text
    assert engine.run(make_request(PROMPT, "one")) == 0


# --- units that end, stop, or restart with other pages ---


def test_a_killed_unit_is_gone_by_its_heartbeat_and_found_again(
    serve: Serve, machine: Any, tmp_path: Path
) -> None:
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    killed(pid)
    # flexkv must not rely on the file's modification time, so the test sets it to the far future
    os.utime(live_files(tmp_path)[-1], (4e9, 4e9))
    wait_for(lambda: knows(other, 0) and share_of(other).joined == 0)
    assert len(live_files(tmp_path)) == 2, "its folder stays as it was"
    assert other.run(make_request(PROMPT, "two")) == 0
    serve()
    wait_for(lambda: knows(other, PAGES))


def test_control_without_a_limit_a_killed_unit_is_never_gone(
    serve: Serve, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines_module, "GONE_BEATS", 10_000)
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    killed(pid)
    beats = watch_of(other)._writer._beat
    wait_for(lambda: watch_of(other)._writer._beat > beats + 20)
    assert knows(other, PAGES)
    assert other.run(make_request(PROMPT, "two")) == 20, "what it has left is whole"


def test_a_file_left_behind_promises_nothing(serve: Serve, machine: Any) -> None:
    killed(serve())
    other = machine("b")
    wait_for(lambda: len(watch_of(other)._units) == 2)
    beats = watch_of(other)._writer._beat
    wait_for(lambda: watch_of(other)._writer._beat > beats + 10)
    assert knows(other, 0)


def test_a_stopped_unit_is_gone_until_it_goes_on(serve: Serve, machine: Any) -> None:
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: knows(other, 0))
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: knows(other, PAGES))
    assert other.run(make_request(PROMPT, "two")) == 20


def test_a_unit_killed_while_a_load_waits_costs_no_wrong_number(serve: Serve, machine: Any) -> None:
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    other.add(make_request(PROMPT, "two"))
    killed(pid)
    wait_for(lambda: knows(other, 0))
    other.end_load("two")
    other.step()
    other.check("two")


@pytest.mark.parametrize(("change", "reason"), [("weights", "its weights are others"), ("ranks", "2 ranks")])
def test_a_unit_that_comes_back_as_another_is_refused_with_the_reason(
    serve: Serve, machine: Any, change: str, reason: str
) -> None:
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    killed(pid)
    pid = serve(change)
    wait_for(lambda: any(reason in why for why in share_of(other).refused.values()))
    wait_for(lambda: knows(other, 0))
    killed(pid)
    wait_for(lambda: not share_of(other).refused)
    serve()
    wait_for(lambda: knows(other, PAGES))


def test_a_unit_that_comes_back_with_another_version_is_named_and_its_pages_are_forgotten(
    serve: Serve, machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pid = serve()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    killed(pid)
    pid = serve("version")
    wait_for(lambda: f"a unit's card of another version than {PROTOCOL}" in caplog.text)
    wait_for(lambda: knows(other, 0) and share_of(other).joined == 0)
    assert other.run(make_request(PROMPT, "two")) == 0
    killed(pid)
    serve()
    wait_for(lambda: knows(other, PAGES))


def test_control_other_weights_are_taken_where_nobody_compares_them(
    serve: Serve, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerShare, "wants", lambda share, facts, whom="": True)
    serve("weights")
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))


# --- readers that see an outdated file ---


@contextmanager
def view_of_the_past(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the end of the `with` block, every reader of the file gets the content that it had at the start of the
    block, as through a cache."""
    kept = path.with_name("kept")
    kept.write_bytes(path.read_bytes())
    opened = live_file.open_live
    with monkeypatch.context() as patch:
        patch.setattr(live_file, "open_live", lambda at: opened(kept if at == path else at))
        yield


def outdated(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[MiniEngine, dict[str, Any]]:
    """Makes an engine load pages that their owner has overwritten. Returns the engine, and the number of pages per
    result of their copy."""
    monkeypatch.setattr(machines_module, "GONE_BEATS", 10_000)
    one, other = machine("a", **{"disk.bytes_per_folder": 64 << 10}), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    (path,) = (tmp_path / "shared" / "a").glob(f"*/*/{LIVE_NAME}")
    with view_of_the_past(path, monkeypatch):
        tier = next(tier for tier in one.unit.manager.tiers if hasattr(tier, "volumes"))
        for number in range(1, 40):
            store(one, [token + 1000 * number for token in PROMPT], f"more {number}")
            if not tier.present(0, one.keys_of(make_request(PROMPT))).any():
                break
        assert not tier.present(0, one.keys_of(make_request(PROMPT))).any()
        assert knows(other, PAGES)
        ended: dict[str, Any] = {}
        reader = live_tiers(other)[0]._reader
        poll = reader.poll

        def polled() -> list[Any]:
            results: list[Any] = poll()
            ended.update({result.reason: result for result in results})
            return results

        monkeypatch.setattr(reader, "poll", polled)
        other.add(make_request(PROMPT, "two"))
        other.end_load("two")
        other.step()
    return other, ended


def test_pages_promised_by_an_older_copy_of_the_file_are_named_misses(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, ended = outdated(machine, tmp_path, monkeypatch)
    other.check("two")
    (reason,) = ended
    assert reason.split(":")[0] in ("key", "generation", "tag")
    assert len(ended[reason].failed) == PAGES
    assert knows(other, 0) or not live_tiers(other)[0].present(0, other.keys_of(make_request(PROMPT))).any()


def test_control_without_the_trailers_check_another_page_is_taken(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchecked(
        reader: PeerReader, peer: Any, group: int, image: Any, theirs: int, asked: Any, slot: int
    ) -> str:
        os.preadv(peer.slab.fd, [image], peer.slab.offset(theirs))
        content = np.frombuffer(image, np.uint8)
        reader._put_stripes(group, content, peer.stripes, peer.rewrites, reader._pool.slot(slot))
        return ""

    monkeypatch.setattr(PeerReader, "_take", unchecked)
    other, _ = outdated(machine, tmp_path, monkeypatch)
    assert other.wrong("two") != []


def test_an_older_copy_does_not_count_as_a_heartbeat(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    (path,) = (tmp_path / "shared" / "a").glob(f"*/*/{LIVE_NAME}")
    with view_of_the_past(path, monkeypatch):
        wait_for(lambda: knows(other, 0))
    wait_for(lambda: knows(other, PAGES))


# --- a file server that does not answer ---


@contextmanager
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the end of the `with` block, opening another machine's file waits, as if the file server did not answer."""
    answers = threading.Event()
    opened = live_file.open_live

    def wait(path: Path) -> live_file.LiveFile:
        answers.wait(60)
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(live_file, "open_live", wait)
        try:
            yield
        finally:
            answers.set()


def test_a_unit_that_could_not_look_for_long_does_not_call_others_gone(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(one, 0) and knows(other, PAGES))
    left: list[str] = []
    monkeypatch.setattr(watch_of(other), "_left", left.append)
    watch_of(one)._units.clear()
    # from this line on, `one` writes its heartbeat and does not look at other units
    monkeypatch.setattr(watch_of(one), "_scan", lambda: None)
    answers = threading.Event()
    beat = watch_of(other)._writer.beat
    monkeypatch.setattr(watch_of(other)._writer, "beat", lambda: (answers.wait(60), beat()))
    beats = watch_of(one)._writer._beat
    wait_for(lambda: watch_of(one)._writer._beat > beats + 20)
    answers.set()
    beats = watch_of(other)._writer._beat
    wait_for(lambda: watch_of(other)._writer._beat > beats + 3)
    assert left == []


def test_a_unit_serves_and_closes_while_the_server_does_not_answer(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines_module, "STOP_S", 0.2)
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    with silent_server(monkeypatch):
        assert other.run(make_request(PROMPT, "two")) == 20
        other.close()
        assert len(live_files(tmp_path)) == 2
    wait_for(lambda: len(live_files(tmp_path)) == 1)


def test_a_reset_does_not_wait_for_a_server(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines_module, "STOP_S", 60.0)
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    with silent_server(monkeypatch):
        began_s = time.monotonic()
        share_of(other).retire()
        assert time.monotonic() - began_s < 20
        # `retire` returns early, because a separate thread ends the sharing.
        wait_for(lambda: knows(other, 0) and share_of(other).joined == 0)
        assert len(live_files(tmp_path)) == 2
    wait_for(lambda: len(live_files(tmp_path)) == 1)


def test_what_no_other_unit_would_take_is_named_at_the_start(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "")
    machine("a")
    assert "nothing is shared with other machines: its file: host is ''" in caplog.text
    assert live_files(tmp_path) == []


# --- invalid files, and file servers that refuse a call ---


@pytest.mark.parametrize("kind", ["junk", "pipe", "link", "folder", "foreign", "long"])
def test_what_is_no_units_file_is_named_and_others_are_followed(
    machine: Any, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("a")
    store(one)
    path = only_live_file(tmp_path)
    bad = tmp_path / "shared" / "bad" / path.parent.parent.name / "unit0" / LIVE_NAME
    bad.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(bad)
    elif kind == "link":
        bad.symlink_to(path)
    elif kind == "folder":
        bad.mkdir()
    else:
        bad.write_bytes(b"x" * 100)
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(bad, 12345, -1)
    if kind == "long":
        os.truncate(bad, live_file.MOST_FILE_BYTES + 1)
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))
    wait_for(lambda: f"{bad.parent}: its unit is not followed from here: " in caplog.text)
    assert other.run(make_request(PROMPT, "two")) == 20


def test_a_unit_that_cannot_write_its_file_serves_and_says_so(
    machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("a")
    path = only_live_file(tmp_path)
    path.unlink()
    path.mkdir()
    wait_for(lambda: "other machines do not see that this unit runs" in caplog.text)
    store(one)
    path.rmdir()
    other = machine("b")
    wait_for(lambda: knows(other, PAGES))


@pytest.mark.parametrize("how", ["cut", "removed", "replaced"])
def test_a_file_that_somebody_else_changes_is_written_anew(machine: Any, tmp_path: Path, how: str) -> None:
    one, other = machine("a"), machine("b")
    store(one)
    wait_for(lambda: knows(other, PAGES))
    (path,) = (tmp_path / "shared" / "a").glob(f"*/*/{LIVE_NAME}")
    if how == "cut":
        os.truncate(path, 40)
    elif how == "removed":
        path.unlink()
    else:
        path.with_name("x").write_bytes(b"y" * 5000)
        path.with_name("x").replace(path)
    second = [token + 1000 for token in PROMPT]
    store(one, second, "two")
    wait_for(lambda: knows(other, 2 * PAGES))
    assert other.run(make_request(second, "three")) == 20


def test_the_reader_of_a_unit_that_left_starts_over(machine: Any, tmp_path: Path) -> None:
    one = machine("a")
    path = only_live_file(tmp_path)
    reader = LiveReader(path)
    assert reader.look().is_new
    one.close()
    with pytest.raises(FileNotFoundError):
        reader.look()
