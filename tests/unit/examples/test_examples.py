"""Every program in the folder `examples` runs, prints one line, and fits on a screen or two."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.raw.gds_worker import GDSTransferWorker

EXAMPLES = sorted(
    path for path in (Path(__file__).parents[3] / "examples").glob("*.py") if path.stem != "__init__"
)
LONGEST_LINES = 80


def run(name: str) -> None:
    runpy.run_path(str(next(path for path in EXAMPLES if path.stem == name)), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") == 1
    assert len(path.read_text().splitlines()) < LONGEST_LINES


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_control_an_example_notices_rows_that_were_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LoadPipeline.__init__

    def without_turning(self: LoadPipeline, *arguments: object) -> None:
        device, paged, slots, chunks, _, wait_s = arguments
        made(self, device, paged, slots, chunks, lambda layer, keys, positions: np.copyto(keys, keys), wait_s)  # type: ignore[arg-type]

    monkeypatch.setattr(LoadPipeline, "__init__", without_turning)
    with pytest.raises(AssertionError):
        run("moved_prefix")


def test_control_an_example_notices_blocks_that_were_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GDSTransferWorker, "read", lambda *_: None)
    with pytest.raises(AssertionError):
        run("raw_files")
