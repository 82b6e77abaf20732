"""The generated tables in the docs are up to date with the code."""

from __future__ import annotations

import pytest

from build_support.doc_tables import DOCS, MARKER, TABLES, with_table


@pytest.mark.parametrize("name", TABLES)
def test_pages_have_the_tables_of_the_code(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == with_table(page, TABLES[name]()), f"docs/{name} is not of this code: make docs"


@pytest.mark.parametrize("name", TABLES)
def test_control_a_changed_table_is_noticed(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page != with_table(page, TABLES[name]().replace("| ", "| x", 1))


def test_all_above_the_marker_is_kept() -> None:
    assert with_table(f"# Page\n\n{MARKER}| old |\n", "| new |") == f"# Page\n\n{MARKER}| new |\n"


def test_page_without_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="values to unpack"):
        with_table("# Page\n", "| new |")
