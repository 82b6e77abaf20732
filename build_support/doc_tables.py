"""Writes the tables of the docs that are generated from the code. On each page, the tables replace everything below a
marker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from build_support.vllm_names import markdown as vllm_names
from flexkv.adapters.sglang.identity_fields import markdown as sglang_fields
from flexkv.adapters.tensorrt_llm.identity_fields import ARGUMENTS as TENSORRT_ARGUMENTS
from flexkv.adapters.vllm.identity_fields import markdown as vllm_fields
from flexkv.cli.config_command import markdown_reference
from flexkv.facts.request_settings import markdown_table as request_settings
from flexkv.observe.blend_results import markdown_table as blend_table
from flexkv.observe.metrics import markdown_table
from flexkv.observe.miss_reasons import markdown_table as misses_table
from flexkv.observe.page_losses import markdown_table as losses_table


def markdown_identity() -> str:
    """Returns the tables of docs/identity.md: the fields of every engine's configuration, and how each field enters a
    block's key.
    """
    parts = {
        "vLLM": vllm_fields(),
        "SGLang": sglang_fields(),
        "TensorRT-LLM": TENSORRT_ARGUMENTS.markdown(),
    }
    return "\n\n".join(f"## {engine}\n\n{tables}" for engine, tables in parts.items())


def markdown_metrics() -> str:
    """Returns the tables of docs/metrics.md: the metrics, the reasons why pages are lost and why lookups miss, and the
    results of blending.
    """
    losses = f"## Pages that are not stored or not served\n\n{losses_table()}"
    misses = f"## Blocks that a lookup does not promise\n\n{misses_table()}"
    return (
        f"{markdown_table()}\n\n{losses}\n\n{misses}\n\n## Requests that ask for blending\n\n{blend_table()}"
    )


DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKER = "<!-- what follows is written by `make docs` -->\n"
TABLES: dict[str, Callable[[], str]] = {
    "configuration.md": markdown_reference,
    "identity.md": markdown_identity,
    "metrics.md": markdown_metrics,
    "requests.md": request_settings,
    "vllm.md": vllm_names,
}


def with_table(page: str, table: str) -> str:
    """Returns the text of a page with everything below its marker replaced by `table`.

    Raises:
        ValueError: the page has no marker or several.
    """
    above, _ = page.split(MARKER)
    return f"{above}{MARKER}{table}\n"


def main() -> None:
    for name, table in TABLES.items():
        path = DOCS / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
