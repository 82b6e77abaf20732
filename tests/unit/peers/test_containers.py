"""Units in containers that mount the same folder. Each container has a process namespace of its own, so a unit's
process id has no meaning for units in other containers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexkv.cli.peers_command import command
from flexkv.peers.card import SHOWN_DIGITS
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, Make, knows, settings_of, share_of, wait_for

PAGES = 5
ROOT = Path(__file__).resolve().parents[3]
APART = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""The beginning of a command line. It runs the rest of the command line in a new user namespace, a new process
namespace and a new mount namespace.
"""


def can_be_apart() -> bool:
    if shutil.which(APART[0]) is None:
        return False
    return subprocess.run([*APART, "true"], capture_output=True, timeout=30).returncode == 0


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a keeper (see `keeper_child`) in a container. Its unit uses the runtime folder `run` of this test."""
    if not can_be_apart():
        pytest.skip("no process namespace can be made here")
    with subprocess.Popen(
        [*APART, sys.executable, "-m", "tests.unit.peers.keeper_child"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        print(tmp_path / "run", "own", file=child.stdin, flush=True)
        assert 1 < int(child.stdout.readline()) < 100, "it is among the first processes of its namespace"
        yield child
        child.stdin.close()  # closing stdin ends the namespace's first process, and so all processes in the namespace
        child.wait(30)


def test_a_unit_in_a_container_is_read_and_its_end_is_seen(
    contained: subprocess.Popen[str], make_engine: Make, tmp_path: Path
) -> None:
    other = make_engine(**settings_of(tmp_path / "run"))
    wait_for(lambda: knows(other, PAGES))
    assert other.run(make_request(PROMPT, "two")) == 20
    (peer,) = share_of(other).peers()
    assert peer["copied"] == PAGES
    shown = CliRunner().invoke(command, ["--folder", str(tmp_path / "run")], terminal_width=200)
    assert shown.exit_code == 0
    for unit in (share_of(other)._card.unit, peer["unit"]):
        assert unit[:SHOWN_DIGITS] in shown.output
    contained.kill()
    wait_for(lambda: share_of(other).joined == 0)
    assert other.run(make_request(PROMPT, "three")) == 20, "its own pages by now"
