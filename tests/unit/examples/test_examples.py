"""Every example runs, reports it in one line, and fits a screen or two."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from flexkv.transfer.layerwise.load import LoadPipeline

EXAMPLES = sorted(
    path for path in (Path(__file__).parents[3] / "examples").glob("*.py") if path.stem != "__init__"
)
LONGEST_LINES = 80


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
        runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
