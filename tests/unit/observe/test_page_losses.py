"""All reasons for which a page is lost are in one list. Each of them is counted by some code, and explained to the
operator in the docs.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from flexkv.observe import METRICS, Counters, PageLoss
from flexkv.observe.page_losses import NOT_STORED, markdown_table, reasons_of

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "flexkv/observe/page_losses.py"
TABLE = ROOT / "flexkv/observe/metrics.py"


@functools.cache
def product() -> dict[Path, ast.Module]:
    files = [path for path in (ROOT / "flexkv").rglob("*.py") if path not in (LIST, TABLE)]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def named_in(module: ast.Module) -> set[str]:
    """Returns the members of `PageLoss` that a module's code names."""
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "PageLoss"
    }


def counted_by_name(module: ast.Module) -> set[str]:
    """Returns the metrics of lost pages whose names a module passes to a function as text. Code should use `PageLoss`
    instead of such names."""
    metrics = {loss.metric for loss in PageLoss}
    return {
        node.args[0].value
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value in metrics
    }


def test_every_reason_is_named_by_some_code() -> None:
    used = set().union(*map(named_in, product().values()))
    assert used == {loss.name for loss in PageLoss}


def test_no_loss_is_counted_past_the_list() -> None:
    assert {path: found for path, module in product().items() if (found := counted_by_name(module))} == {}


def test_control_a_loss_counted_by_a_string_is_seen() -> None:
    module = ast.parse('counters.add("flexkv_dropped_store_pages_total", 3, reason="busy")')
    assert counted_by_name(module) == {NOT_STORED}
    assert named_in(module) == set()


@pytest.mark.parametrize("loss", PageLoss, ids=lambda loss: loss.name)
def test_a_reason_has_a_series_and_a_row_in_the_documentation(loss: PageLoss) -> None:
    others = {
        name: values[0]
        for name, values in METRICS[loss.metric].labels
        if name != "reason"  # the labels other than the reason, such as the direction
    }
    counters = Counters()
    loss.count(counters, 3, **others)
    loss.count(counters, 0, **others)
    assert counters.value(loss.metric, **others, **loss.labels) == 3
    row = f"| {loss.words} |"
    assert row in markdown_table()
    assert row in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_the_reasons_of_a_metric_are_those_of_its_label() -> None:
    of_pages = {name for name in METRICS if name.endswith("_pages_total")}
    for name in of_pages:
        labels = dict(METRICS[name].labels)
        assert labels.get("reason", ("",) * len(reasons_of(name))) == reasons_of(name), name


def test_no_two_reasons_share_a_series() -> None:
    assert len({(loss.metric, loss.reason) for loss in PageLoss}) == len(PageLoss)
