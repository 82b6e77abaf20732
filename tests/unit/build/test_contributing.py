"""The pages for contributors are right: their code blocks run, and the files and commands that they name exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from flexkv.config.sections import IndexConfig
from flexkv.observe import counters as counters_module
from flexkv.observe import metrics as metrics_module
from flexkv.observe.counters import Counters
from flexkv.observe.metrics import Metric, MetricKind, markdown_table
from tests.unit.cache import test_tier_seam
from tests.unit.cache.eviction_model import CHOICES

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "contributing"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted(FOLDER.glob("*.md"))]
AGAIN = "in docs/contributing again: the page shows what the tests run"
NAMED = re.compile(r"`((?:flexkv|csrc|tests|benchmarks|docs)/[\w/.]+\.(?:py|h|cpp|md)|[\w/]+/)`")


def blocks(page: str, language: str) -> list[str]:
    """Returns the page's code blocks in `language`. The indentation of blocks inside a list is removed."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", (FOLDER / page).read_text(), re.S | re.M)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


def toy_engine() -> Any:
    (code,) = blocks("add-an-engine.md", "python")
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + code, "add-an-engine.md", "exec"), names)
    return names["ToyEngine"]


def test_the_engine_of_the_page_gets_back_what_it_stored() -> None:
    engine = toy_engine()(blocks=8, model="m")
    try:
        tokens = list(range(50))
        for layer in engine.pool:
            layer[:3] = (layer.ctypes.data >> 4) % 251
            layer[:3, ::2] += 1
        kept = [layer[:3].copy() for layer in engine.pool]
        assert engine.store("first", tokens, [0, 1, 2, 3]) == 3
        assert engine.load("second", tokens, [5, 6, 7]) == 48
        assert all((layer[5:8] == bytes_).all() for layer, bytes_ in zip(engine.pool, kept, strict=True))
        assert engine.load("other", [7, *tokens], [4]) == 0
        engine.unit.manager.check_integrity()
    finally:
        engine.close()


def test_control_the_engine_of_the_page_sees_a_page_that_was_not_stored() -> None:
    engine = toy_engine()(blocks=8, model="m")
    try:
        tokens = list(range(50))
        assert engine.store("first", tokens, [0, 1, 2]) == 3
        engine.unit.manager.forget(0, engine.keys(tokens)[1:2])
        assert engine.load("second", tokens, [5, 6, 7]) == 16
    finally:
        engine.close()


def test_the_tier_of_the_page_is_the_one_that_the_seam_test_runs() -> None:
    (code,) = blocks("add-a-tier.md", "python")
    assert code.strip() == inspect.getsource(test_tier_seam.ToyTier).strip(), f"quote ToyTier {AGAIN}"


def test_the_policy_of_the_page_is_the_one_that_the_native_tests_run() -> None:
    (code,) = blocks("add-an-eviction-policy.md", "cpp")
    assert code.strip() in (ROOT / "tests/native/most_recent.h").read_text(), f"quote most_recent.h {AGAIN}"
    assert "most_recent_kind()" in (ROOT / "tests/native/test_eviction.cpp").read_text()


def test_every_policy_has_a_line_in_each_place_that_the_page_names() -> None:
    names = get_args(IndexConfig.model_fields["policy"].annotation)
    listed = (ROOT / "csrc/index/eviction/eviction_policy.cpp").read_text()
    assert set(names) == set(re.findall(r"(\w+)_kind\(\),", listed)) == set(CHOICES)


def test_the_metric_of_the_page_counts_and_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    row, use, *_ = blocks("add-a-metric.md", "python")
    metric = eval(row.strip(), {"Metric": Metric, "MetricKind": MetricKind})
    counters = Counters()
    with pytest.raises(ValueError, match="flexkv_naps_total"):
        exec(use, {"counters": counters})
    table = {**metrics_module.METRICS, metric.name: metric}
    for module in (metrics_module, counters_module):
        monkeypatch.setattr(module, "METRICS", table)
    exec(use, {"counters": counters})
    assert counters.value("flexkv_naps_total", lane="load") == 1
    assert metric.all_series() == ["load", "store"]
    assert f"| `{metric.name}` | counter | naps | lane: load, store |" in markdown_table()
    with pytest.raises(ValueError, match="allowed are load, store"):
        counters.add("flexkv_naps_total", lane="sideways")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = set(NAMED.findall(text)) | set(re.findall(r"pytest ([\w/.]+)", text))
    # A page may name files relative to its own folder, as tests/README.md does.
    roots = (ROOT, page.parent, ROOT / "flexkv")
    real = [name for name in named if "NAME" not in name and name != "PATH"]
    assert [name for name in real if not any((root / name).exists() for root in roots)] == []


def test_control_a_file_that_is_gone_is_seen() -> None:
    assert NAMED.findall("in `flexkv/no/such.py`, or `csrc/gone/`") == ["flexkv/no/such.py", "csrc/gone/"]


def test_every_folder_of_tests_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "tests/README.md").read_text(), re.M))
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert rows == {name for name in folders if not name.startswith(("_", "."))}


def test_the_quick_files_exist() -> None:
    """The test files that `make check` runs, which QUICK in the Makefile lists, exist."""
    text = (ROOT / "Makefile").read_text()
    quick = text.partition("\nQUICK = ")[2].partition("\ncheck:")[0].replace("\\\n", " ")
    names = [*re.findall(r"\s((?:config|build)/\S+\.py)", quick), "layout", "observe"]
    for folder, files in re.findall(r"addprefix (\w+/test_\w*),([^)]*)\)", quick):
        names += [folder + name for name in files.split()]
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "tests/unit" / name).exists()] == []


def test_the_example_of_a_commit_subject_fits_the_rule() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (subject,) = re.findall(r"^```\n(.*)\n```", text, re.M)
    assert len(subject) <= 72
    assert re.fullmatch(r"[a-z0-9_/., -]+: [a-z].*[^.]", subject)
