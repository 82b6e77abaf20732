"""Docstrings, comments and Markdown are free of some habits of prose over which a native reader stumbles.

A sentence opens with its subject or its verb, and not with "Of", "As of" or "As check()". A rate has "per" and no
article, as in "bytes per page". Plain words, such as "must" and "of it", are used instead of words that are now found
only in contracts.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
NEWLINE = "\n"

OPENING = re.compile(
    r"""(?: \A | [.!?:;]["')`*]*\s | \n\s*\n )  # where a passage, a sentence or a paragraph begins
        [\s"'(`*\[]*
        (?P<found> (?: Of | As\s+of ) \b (?!\s+course\b) | As\s+ (?: `[^`]*` | [\w.:]+\(\) ) )""",
    re.VERBOSE,
)

RATE = re.compile(
    r"""(?<!['’]) \b  # not "it's a page"
        (?P<found>
            (?: bytes | [mu]?s | [KMGT]iB | calls? | ops? | probes? ) \s+ a \s+
            (?: page | block | token | rank | layer | request | second (?!\s+time\b) )
        )
        \b (?!
            [-'’]                                                                 # not "calls a layer-first pool"
            | \s+ (?! (?:across|as|is|plus|this|unless|was) \b ) [a-z]+s \b       # not "bytes a page holds"
            | \s+ (?: can | could | had | may | might | must | will | would ) \b  # not "bytes a page may hold"
        )""",
    re.VERBOSE,
)

LEGALESE = re.compile(
    r"""\b(?P<found>
        shall | albeit | whence | whilst | hitherto | hence(?:forth|forward)
        | thereof | therein | thereto | thereafter | thereupon | hereby | herein | hereof | heretofore | hereinafter
        | wherein | whereof | whereby | whereupon
        | aforesaid | aforementioned
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)


class Passage(NamedTuple):
    """A docstring, a block of comment lines, or a Markdown paragraph, list item or table cell."""

    line: int
    text: str


CXX_TOKEN = re.compile(
    r"""(?P<comment> //[^\n]* | /\*.*?\*/ )
        | R"(?P<mark>[^\s()\\]*)\( .*? \)(?P=mark)"
        | "(?:\\.|[^"\\\n])*"
        | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'  # after a digit it separates digits
    """,
    re.VERBOSE | re.DOTALL,
)

FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]|#+|>)\s+")


def joined(comments: Iterator[tuple[int, bool, str]]) -> list[Passage]:
    """Joins comments to passages. Comments on consecutive lines become one passage if the lines have nothing but
    comments.

    Args:
        comments: for each comment its line, whether nothing else is on the line, and its text without comment signs.
    """
    found: list[Passage] = []
    grows = False
    for line, alone, text in comments:
        if grows and alone and found[-1].line + found[-1].text.count("\n") + 1 == line:
            found[-1] = Passage(found[-1].line, f"{found[-1].text}\n{text}")
        else:
            found.append(Passage(line, text))
        grows = alone
    return found


def python_passages(source: str) -> list[Passage]:
    """Returns the comments of a Python file, and its docstrings, including the docstrings of attributes."""
    docstrings = [
        Passage(node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    comments = (
        (token.start[0], not token.line[: token.start[1]].strip(), token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    return docstrings + joined(comments)


def cxx_passages(source: str) -> list[Passage]:
    """Returns a C++ file's comments. Text in a string literal does not count, even if it looks like a comment."""

    def comments() -> Iterator[tuple[int, bool, str]]:
        for token in CXX_TOKEN.finditer(source):
            if token["comment"]:
                before = source[source.rfind("\n", 0, token.start()) + 1 : token.start()]
                lines = token["comment"].removesuffix("*/").split("\n")
                text = "\n".join(line.strip().lstrip("/*!<").lstrip() for line in lines)
                yield source.count("\n", 0, token.start()) + 1, not before.strip(), text

    return joined(comments())


def markdown_passages(source: str) -> list[Passage]:
    """Returns the paragraphs, list items, headings and table cells of a Markdown file, without its blocks of code."""
    found: list[Passage] = []
    fenced = grows = False
    for number, line in enumerate(source.split("\n"), 1):
        if FENCE.match(line):
            fenced, grows = not fenced, False
        elif fenced or not line.strip():
            grows = False
        elif line.lstrip().startswith("|"):
            found += [Passage(number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line)]
            grows = False
        elif grows and not ITEM.match(line):
            found[-1] = Passage(found[-1].line, f"{found[-1].text}\n{line.strip()}")
        else:
            found.append(Passage(number, ITEM.sub("", line).strip()))
            grows = True
    return found


READERS = {
    ".py": python_passages,
    ".pyi": python_passages,
    ".cpp": cxx_passages,
    ".h": cxx_passages,
    ".cu": cxx_passages,
    ".cuh": cxx_passages,
    ".md": markdown_passages,
}


def passages(name: str, source: str) -> list[Passage]:
    return READERS[Path(name).suffix](source)


def uses(habit: re.Pattern[str], name: str, prose: list[Passage]) -> list[str]:
    """Returns `file:line: words` for each use of a habit in the prose of a file."""
    return [
        f"{name}:{line + text.count(NEWLINE, 0, match.start('found'))}: {' '.join(match['found'].split())}"
        for line, text in prose
        for match in habit.finditer(text)
    ]


@pytest.fixture(scope="module")
def tree() -> dict[str, list[Passage]]:
    """Returns the passages of every tracked file, by the file's name."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: nothing tells which files are the project's")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if Path(name).suffix in READERS]
    found = {
        name: passages(name, (ROOT / name).read_text(encoding="utf-8"))
        for name in names
        if (ROOT / name).is_file()
    }
    assert {Path(name).suffix for name in found} == set(READERS), "this looks at the whole tree"
    return found


def test_no_sentence_begins_with_of(tree: dict[str, list[Passage]]) -> None:
    found = [use for name, prose in tree.items() for use in uses(OPENING, name, prose)]
    assert not found, "let the subject or the verb come first"


def test_rates_are_per_page_or_per_second(tree: dict[str, list[Passage]]) -> None:
    found = [use for name, prose in tree.items() for use in uses(RATE, name, prose)]
    assert not found, "write per"


def test_words_of_contracts_are_not_used(tree: dict[str, list[Passage]]) -> None:
    found = [use for name, prose in tree.items() for use in uses(LEGALESE, name, prose)]
    assert not found, "use the plain word: must, of it, in which, while"


WRITTEN = {
    "module.py": '"""{}"""\n',
    "attribute.py": 'LIMIT = 1\n"""{}"""\n',
    "method.py": 'class A:\n    def b(self) -> None:\n        """Does it.\n\n        {}\n        """\n',
    "comment.py": "limit = 1\n# {}\n",
    "beside.py": "limit = 1  # {}\n",
    "stub.pyi": "class A:\n    b: int\n    # {}\n",
    "line.cpp": 'auto text = "//";  // {}\n',
    "doc.h": "/// {}\nint limit = 1'000;\n",
    "block.cu": "/* {} */\n",
    "inner.cuh": "/**\n * {}\n */\n",
    "paragraph.md": "# Page\n\n{}\n",
    "item.md": "Two:\n- {}\n- more\n",
    "cell.md": "| name | meaning |\n|---|---|\n| `limit` | {} |\n",
}
"""Files with prose in different places, by file name; `{}` is replaced by the prose to test."""

written = pytest.mark.parametrize("name", WRITTEN)


def uses_in(name: str, habit: re.Pattern[str], prose: str) -> list[str]:
    return uses(habit, name, passages(name, WRITTEN[name].replace("{}", prose)))


@written
@pytest.mark.parametrize(
    "prose",
    [
        "Of a page its bytes.",
        "As of the index; checked.",
        "Ends it. Of all pages the first.",
        "(Of two, one.)",
    ],
)
def test_control_a_sentence_that_begins_with_of_is_found(name: str, prose: str) -> None:
    (found,) = uses_in(name, OPENING, prose)
    assert found.endswith((": Of", ": As of"))


@written
@pytest.mark.parametrize("prose", ["As check_digests().", "Ends it. As `check`, but for one page."])
def test_control_a_sentence_that_begins_with_as_and_a_name_is_found(name: str, prose: str) -> None:
    assert len(uses_in(name, OPENING, prose)) == 1


@written
@pytest.mark.parametrize("prose", ["Each page shall be read.", "The page, and the digest thereof."])
def test_control_a_word_of_contracts_is_found(name: str, prose: str) -> None:
    assert len(uses_in(name, LEGALESE, prose)) == 1


@written
@pytest.mark.parametrize("prose", ["A shallow copy.", "It is therefore read.", "The rest is inherent."])
def test_control_words_that_only_look_like_those_pass(name: str, prose: str) -> None:
    assert not uses_in(name, LEGALESE, prose)


@written
@pytest.mark.parametrize(
    "prose",
    [
        "Of course it is.",
        "Bytes of a page. Off it goes.",
        "Two; of these, one.",
        "As a page is read, it is verified.",
    ],
)
def test_control_other_sentences_pass(name: str, prose: str) -> None:
    assert not uses_in(name, OPENING, prose)


@written
@pytest.mark.parametrize(
    "rate",
    [
        "12 bytes a page.",
        "8 us a block, at most",
        "one call a layer",
        "5 ops a second in all",
        "(4 KiB a token)",
    ],
)
def test_control_a_rate_without_per_is_found(name: str, rate: str) -> None:
    assert len(uses_in(name, RATE, rate)) == 1


@written
@pytest.mark.parametrize(
    "prose",
    [
        "12 bytes per page",
        "the bytes a page holds",
        "bytes a layer may take",
        "it's a page",
        "calls a layer-first pool",
        "the same bytes a second time",
    ],
)
def test_control_no_rate_is_found_elsewhere(name: str, prose: str) -> None:
    assert not uses_in(name, RATE, prose)


BAD = "Of a page: 12 bytes a page"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("string.py", f'text = "{BAD}"\ncall("# {BAD}")\n'),
        ("string.cpp", f'auto text = "// {BAD}";\n'),
        ("raw.cpp", f'auto text = R"(\n// {BAD}\n)";\n'),
        ("fenced.md", f"Run:\n\n```bash\n{BAD}\n```\n"),
    ],
)
def test_control_code_is_no_prose(name: str, source: str) -> None:
    prose = passages(name, source)
    assert not uses(OPENING, name, prose)
    assert not uses(RATE, name, prose)


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("lines.py", '"""Counts 12 bytes\na page."""\n', 1),
        ("lines.cpp", "int a;\n// Counts\n// 12 bytes\n// a page.\n", 3),
        ("lines.md", "Counts\n12 bytes\na page.\n", 2),
    ],
)
def test_control_a_rate_over_two_lines_is_found_with_its_line(name: str, source: str, line: int) -> None:
    assert uses(RATE, name, passages(name, source)) == [f"{name}:{line}: bytes a page"]


@pytest.mark.parametrize(
    ("source", "found"),
    [("# The index\n# Of Things.\n", []), ("# The index\n\n# Of things.\n", ["comment.py:3: Of"])],
)
def test_control_lines_that_follow_each_other_are_one_comment(source: str, found: list[str]) -> None:
    assert uses(OPENING, "comment.py", passages("comment.py", source)) == found
