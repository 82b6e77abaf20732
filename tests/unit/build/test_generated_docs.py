"""The tables of the docs that are made from the code are those that the code makes."""

from __future__ import annotations

from pathlib import Path

from flexkv.cli.config_command import markdown_reference
from flexkv.observe.metrics import markdown_table

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_settings_are_those_of_the_code() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert markdown_reference() in text, "paste the output of `flexkv config docs` into docs/configuration.md"


def test_metrics_are_those_of_the_code() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert markdown_table() in text, (
        "paste what docs/contributing/add-a-metric.md prints into docs/metrics.md"
    )


def test_control_a_changed_table_is_noticed() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert markdown_table().replace("counter", "gauge", 1) not in text
