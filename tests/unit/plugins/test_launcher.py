"""The launcher runs plugins as processes. It passes each plugin the role and rank of its process, restarts plugins that
end, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv.plugins import launcher
from flexkv.plugins.base import Place, Role, Times
from flexkv.plugins.launcher import PluginLauncher
from flexkv.plugins.process_tree import children_of
from flexkv.plugins.programs import find_programs
from tests.unit.plugins.plugin_folders import (
    DEADLINE_S,
    ENDS,
    EXITS,
    FLOODS,
    HANGS,
    LEAVES,
    QUICK,
    SLEEPS,
    Held,
    Lines,
    plugin,
    processes_of,
    wait_for,
)

ROOT = Path(__file__).resolve().parents[3]
SCHEDULER = Place(Role.SCHEDULER, None, "a socket")

SHARE_OF_FLOODS = 0.1
"""While a plugin floods its output, the engine's process must use less than this share of a core. Logging ten lines per
second takes a millisecond. If the whole flood reached the engine, it would use all the time that the process gets."""

Launch = Callable[..., PluginLauncher]


@pytest.fixture
def launch(tmp_path: Path, log: Lines) -> Iterator[Launch]:
    """Returns a function that starts the plugins in `tmp_path`. The test fails if a process or another resource of the
    plugins remains at the test's end."""
    before = Held()
    launchers: list[PluginLauncher] = []

    def start(place: Place = SCHEDULER) -> PluginLauncher:
        programs = find_programs(str(tmp_path)).at(place.role, place.rank)
        launchers.append(PluginLauncher(place, programs, str(tmp_path), QUICK))
        return launchers[-1]

    yield start
    assert all(each.close() for each in launchers)
    assert processes_of(tmp_path) == set()
    assert Held() == before


def keeper_of(folder: Path) -> int:
    (keeper,) = processes_of(folder) & set(children_of(os.getpid()))
    return keeper


def plugins_of(folder: Path) -> set[int]:
    return processes_of(folder) - {keeper_of(folder)}


@pytest.mark.parametrize(
    ("place", "role", "rank"),
    [(SCHEDULER, "scheduler", ""), (Place(Role.WORKER, 3, "a socket"), "worker", "3")],
    ids=["scheduler", "worker"],
)
def test_a_plugin_knows_where_it_runs(
    place: Place, role: str, rank: str, launch: Launch, log: Lines, tmp_path: Path
) -> None:
    plugin(tmp_path, "beside.py", "NAME = 'a module beside it'\n")
    plugin(
        tmp_path,
        "all_tells.py",
        "import json, os, sys, beside, flexkv\n"
        "names = [f'FLEXKV_PLUGIN_{name}' for name in ('ROLE', 'RANK', 'SOCKET')]\n"
        "print(json.dumps([__name__, sys.argv, os.getcwd(), beside.NAME, flexkv.__file__,\n"
        "                  *map(os.environ.get, names)]))\n",
    )
    launch(place)
    log.wait_for("ended with 0, and is not started again")
    (line,) = [line for line in log.lines if "__main__" in line]
    assert line.startswith(f"INFO plugin of the {role}{' 3' if rank else ''}, all_tells.py: [")
    told = json.loads(line.partition("all_tells.py: ")[2])
    path = str(tmp_path / "all_tells.py")
    package = str(ROOT / "flexkv" / "__init__.py")
    assert told == [
        "__main__", [path], str(tmp_path), "a module beside it", package, role, rank, "a socket"
    ]  # fmt: skip


def test_a_plugin_that_fails_is_started_again_and_again_later(
    launch: Launch, log: Lines, tmp_path: Path
) -> None:
    plugin(tmp_path, "all_exits", EXITS)
    launch()
    for pause in ("0.05", "0.1", "0.2"):
        log.wait_for(f"all_exits: ended with 3; it is started again in {pause} s")
    assert log.count("all_exits: here") >= 3


def test_a_plugin_that_ends_well_is_not_started_again(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_ends", ENDS)
    plugin(tmp_path, "all_exits", EXITS)
    launch()
    log.wait_for("ended with 3; it is started again in 0.4 s")
    assert log.count("all_ends: done") == 1
    assert log.count("all_ends: ended with 0, and is not started again") == 1


def test_a_killed_plugin_is_started_again(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_sleeps")
    launch()
    log.wait_for("is started as process")
    wait_for(lambda: len(plugins_of(tmp_path)) == 1, "the plugin runs")
    (process,) = plugins_of(tmp_path)
    os.kill(process, signal.SIGKILL)
    log.wait_for("all_sleeps: ended by signal 9; it is started again in 0.05 s")
    log.wait_for("is started as process", times=2)


def test_a_program_that_cannot_be_executed_is_named(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_text", "no program\n")
    launch()
    log.wait_for("WARNING plugin of the scheduler, all_text: cannot be started: [Errno 8] Exec format error")


def test_a_hanging_plugin_is_killed_at_the_end(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_hangs", HANGS)
    one = launch()
    log.wait_for("all_hangs: deaf")
    assert one.close()
    assert log.count("keeper: killed after 0.3 s: all_hangs") == 1
    assert processes_of(tmp_path) == set()


def test_a_flooding_plugin_loses_lines_with_their_count(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_floods", FLOODS)
    plugin(tmp_path, "all_exits", EXITS)
    launch()
    log.wait_for("lines were lost: more than 10 per second)", times=3)
    assert log.count("all_floods: flood") < 1000, "of the hundred thousands that were written"
    log.wait_for("all_exits: here", times=3)


def engines_share(seconds: int) -> float:
    """Watches this process, which stands for the engine's, for `seconds` seconds. Returns the largest share of a core
    that it used in any one of them."""
    shares = []
    for _ in range(seconds):
        began_s, spent_s = time.monotonic(), time.process_time()
        time.sleep(1.0)
        shares.append((time.process_time() - spent_s) / (time.monotonic() - began_s))
        if shares[-1] > SHARE_OF_FLOODS:
            break
    return max(shares)


def test_a_flooding_plugin_takes_none_of_the_engines_time(launch: Launch, log: Lines, tmp_path: Path) -> None:
    """A plugin that floods its output takes almost no time of the engine's process. This process reads the first 100
    lines, and then 10 lines per second."""
    plugin(tmp_path, "all_floods", FLOODS)
    launch()
    log.wait_for("lines were lost: more than 10 per second)")
    assert engines_share(1) < SHARE_OF_FLOODS


def test_what_a_plugin_leaves_behind_ends_too(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_leaves", LEAVES)
    one = launch()
    log.wait_for("all_leaves: left")
    wait_for(lambda: len(plugins_of(tmp_path)) == 3, "it and its two processes run")
    assert one.close()
    assert processes_of(tmp_path) == set()


def test_processes_of_its_session_end_with_a_plugin(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_leaves", "#!/bin/sh\nsleep 1000 &\necho left\n")
    launch()
    log.wait_for("all_leaves: ended with 0")
    wait_for(lambda: not plugins_of(tmp_path), "what it left behind ends")


def test_no_plugin_can_gain_rights(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_rights", "#!/bin/sh\ngrep NoNewPrivs /proc/self/status\nid -u\n")
    launch()
    log.wait_for("all_rights: NoNewPrivs: 1")
    log.wait_for(f"all_rights: {os.geteuid()}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_keeper_that_ends_takes_its_plugins_along_and_is_started_again(
    number: signal.Signals, launch: Launch, log: Lines, tmp_path: Path
) -> None:
    plugin(tmp_path, "all_sleeps")
    launch()
    log.wait_for("is started as process")  # the launcher logs this after the process has started
    wait_for(lambda: len(processes_of(tmp_path)) == 2, "keeper and plugin run")
    before = processes_of(tmp_path)
    os.kill(keeper_of(tmp_path), number)
    log.wait_for("the keeper of the plugins of the scheduler ended")
    log.wait_for("is started as process", times=2)
    wait_for(lambda: not before & processes_of(tmp_path), "the first plugin ends with its keeper")


def test_a_keeper_that_hangs_is_killed_with_its_plugins(launch: Launch, log: Lines, tmp_path: Path) -> None:
    plugin(tmp_path, "all_leaves", LEAVES)
    one = launch()
    log.wait_for("all_leaves: left")
    one._times = Times(grace_s=0.1, kill_s=0.1)
    os.kill(keeper_of(tmp_path), signal.SIGSTOP)
    one.close()
    assert log.count("is killed: it does not end") == 1
    wait_for(lambda: not processes_of(tmp_path), "all of them end")


ENGINE = """
import os, sys, time
from flexkv.plugins.base import Place, Role
from flexkv.plugins.launcher import PluginLauncher
from flexkv.plugins.programs import find_programs
programs = find_programs(sys.argv[1]).at(Role.SCHEDULER, None)
one = PluginLauncher(Place(Role.SCHEDULER, None, "a socket"), programs, sys.argv[1])
while one._process is None:
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(1000)  # a worker that was forked later has the engine's descriptors, and outlives it
time.sleep(1000)
"""


def killed_engine(folder: Path, within_s: float = DEADLINE_S) -> None:
    """Starts plugins from a separate process, which stands for an engine, and kills this process when the plugins run.
    Asserts that no process is left after `within_s` seconds.
    """
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(folder)], cwd=ROOT, start_new_session=True)
    try:
        wait_for(lambda: len(processes_of(folder)) >= 5, "engine, worker, keeper and plugins run")
        engine.kill()
        engine.wait(DEADLINE_S)
        wait_for(
            lambda: not processes_of(folder) - in_session(engine.pid),
            "nothing of the plugins is left",
            within_s,
        )
    finally:
        for process in in_session(engine.pid):
            os.kill(process, signal.SIGKILL)


def in_session(leader: int) -> set[int]:
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                if os.getsid(int(process.name)) == leader:
                    found.add(int(process.name))
            except ProcessLookupError:
                continue
    return found


def test_plugins_end_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    plugin(tmp_path, "all_leaves", LEAVES)
    plugin(tmp_path, "all_hangs", HANGS)
    killed_engine(tmp_path)
    wait_for(lambda: not processes_of(tmp_path), "the worker that this test killed ends")


def test_plugins_without_a_thread_are_given_up(
    launch: Launch, log: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    plugin(tmp_path, "all_sleeps")
    assert launch().close()
    assert log.count("are not started: can't start new thread") == 1


def test_a_keeper_that_cannot_start_is_named(
    launch: Launch, log: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "own_program", lambda module: [str(tmp_path / "nowhere")])
    plugin(tmp_path, "all_sleeps")
    launch()
    log.wait_for("cannot be started: [Errno 2] No such file or directory", times=2)


# --- controls with a broken launcher or keeper, which the tests must detect ---


def broken_keeper(monkeypatch: pytest.MonkeyPatch, patch: str) -> None:
    """Makes launchers start keepers that first execute the code `patch`."""
    start = f"import sys\nfrom flexkv.plugins.keeper import __main__ as keeper\n{patch}\nkeeper.main()"
    monkeypatch.setattr(launcher, "own_program", lambda module: [sys.executable, "-c", start])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def leftovers(folder: Path, log: Lines) -> set[int]:
    """Starts a plugin that starts child processes, and closes its launcher. Kills the processes that still run, and
    returns their ids."""
    plugin(folder, "all_leaves", LEAVES)
    programs = find_programs(str(folder)).at(Role.SCHEDULER, None)
    one = PluginLauncher(SCHEDULER, programs, str(folder), QUICK)
    log.wait_for("all_leaves: left")
    wait_for(lambda: len(sessions_of(folder)) == 3, "keeper, plugin and a process of its own run")
    one.close()
    left = processes_of(folder)
    kill_all(folder)
    return left


def sessions_of(folder: Path) -> set[int]:
    found = set()
    for process in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getsid(process))
    return found


def kill_all(folder: Path) -> None:
    def none_left() -> bool:
        for process in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not processes_of(folder)

    wait_for(none_left, "all are killed")


def test_control_a_keeper_that_kills_nothing_leaves_orphans(
    tmp_path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_keeper(monkeypatch, "keeper.kill_descendants = lambda pid: 0")
    assert len(leftovers(tmp_path, log)) == 1, "the process in a session of its own"


def test_control_a_right_keeper_leaves_none(
    tmp_path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_keeper(monkeypatch, "")
    assert leftovers(tmp_path, log) == set()


def test_control_a_keeper_may_gain_rights_without_its_promise(
    tmp_path: Path, log: Lines, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_keeper(monkeypatch, "keeper.PR_SET_NO_NEW_PRIVS = keeper.PR_SET_CHILD_SUBREAPER")
    plugin(tmp_path, "all_rights", "#!/bin/sh\ngrep NoNewPrivs /proc/self/status\n")
    launch()
    log.wait_for("all_rights: NoNewPrivs: 0")


def test_control_a_keeper_that_passes_every_line_takes_the_engines_time(
    tmp_path: Path, log: Lines, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_keeper(
        monkeypatch,
        "from flexkv.plugins.keeper import output\noutput.LINES_PER_S, output.BURST_LINES = 1e9, 10**9",
    )
    plugin(tmp_path, "all_floods", FLOODS)
    launch()
    log.wait_for("all_floods: flood")
    assert engines_share(30) > SHARE_OF_FLOODS


def test_control_a_launcher_that_does_not_close_is_seen(tmp_path: Path, log: Lines) -> None:
    before = Held()
    plugin(tmp_path, "all_sleeps", SLEEPS)
    programs = find_programs(str(tmp_path)).at(Role.SCHEDULER, None)
    one = PluginLauncher(SCHEDULER, programs, str(tmp_path), QUICK)
    log.wait_for("is started as process")
    assert Held() != before
    assert processes_of(tmp_path)
    assert one.close()
    assert Held() == before


def test_control_an_engine_whose_keeper_does_not_watch_it_leaves_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: if a keeper does not notice the engine's end, plugins remain. A keeper learns of this end from a pipe
    and from a signal. A worker that the engine forked later keeps the pipe open, and in this control the keeper does
    not get the signal."""
    blind = ENGINE.replace(
        "programs =",
        "from flexkv.plugins import launcher\n"
        "start = 'from flexkv.plugins.keeper import __main__ as k; k.PR_SET_PDEATHSIG = 36; k.main()'\n"
        "launcher.own_program = lambda module: [sys.executable, '-c', start]\n"
        "programs =",
        1,
    )
    monkeypatch.setattr(sys.modules[__name__], "ENGINE", blind)
    plugin(tmp_path, "all_sleeps")
    plugin(tmp_path, "all_hangs", HANGS)
    with pytest.raises(AssertionError, match="nothing of the plugins is left"):
        killed_engine(tmp_path, 5.0)
    kill_all(tmp_path)
