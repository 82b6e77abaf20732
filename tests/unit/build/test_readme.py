"""README and docs are right: programs accept the commands that the pages show, the pages' links lead somewhere, and
their claims hold.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from demo.engine_process import FLEXKV
from flexkv.cli.model_size import ModelSize
from flexkv.config import load_config
from flexkv.config.model import setting_fields
from flexkv.config.names import ALIASES, environment_name
from flexkv.config.sources import OTHER_VARIABLES
from flexkv.errors import ConfigError
from flexkv.facts.ranks import KvGroup
from flexkv.observe.package import name_this_package
from flexkv.unit.capacity import PromptLimit, TierCapacity

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = sorted((ROOT / "docs" / "contributing").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")),
    *DOCS,
    *CONTRIBUTING,
]
LINK = re.compile(r"\[[^\]]+\]\(([^)#]*)(?:#([^)]*))?\)")
README_WORDS = 500
"""The largest number of words of README, without its commands. A person reads this many words in two minutes."""
ONE_MINUTE_WORDS = 250
"""Number of words that a person reads in one minute."""


def words(text: str) -> list[str]:
    """Returns the words that a reader sees, without the targets of links and the bars of tables."""
    return [word for word in re.sub(r"\]\([^)]*\)", "]", text).split() if re.search(r"\w", word)]


def first_words(text: str, count: int) -> str:
    """Returns the first `count` words of a text, including those in tables."""
    return " ".join(words(text)[:count])


def missing_answers(text: str) -> list[str]:
    """Returns the questions that the text does not answer within the first minute of reading."""
    begin = first_words(text, ONE_MINUTE_WORDS)
    answers = {
        "what flexkv does": "keeps the KV cache of vLLM, SGLang and TensorRT-LLM",
        "for whom": "for engines whose prompts repeat",
        "how fast": r"after \d+ ms instead of \d+ ms",
        "how to start": r"`pip install\b.*`vllm serve`",
        "how to try it": r"`make demo`",
    }
    return [question for question, answer in answers.items() if not re.search(answer, begin)]


def shell_commands(text: str) -> list[list[str]]:
    """Returns every command in the text's bash blocks, as the words into which the shell splits it."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    words = [shlex.split(block, comments=True) for block in blocks]
    # shlex.split does not keep line ends. So each of these program names counts as the beginning of a new command.
    commands: list[list[str]] = []
    for word in (w for block in words for w in block):
        if word in ("make", "pip", "vllm", "python", "flexkv", "git"):
            commands.append([])
        commands[-1].append(word)
    return commands


def test_the_vllm_line_is_what_the_demo_and_the_tests_run() -> None:
    """README's command line for vLLM has the settings that the demo and the tests use. Only the module path may differ:
    a working tree needs it, and an installed package does not.
    """
    (serve,) = (command for command in shell_commands(README) if command[:2] == ["vllm", "serve"])
    config = json.loads(serve[serve.index("--kv-transfer-config") + 1])
    assert config == {key: value for key, value in FLEXKV.items() if key != "kv_connector_module_path"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_transfer_config_is_one(page: Path) -> None:
    """Each JSON object on the page that sets `kv_connector` is valid, and flexkv accepts its extra config."""
    text = page.read_text()
    for match in re.finditer(r"\{\s*\"kv_connector\"", text):
        config, _ = json.JSONDecoder().raw_decode(text[match.start() :])
        load_config(config.get("kv_connector_extra_config", {}), {})
        module = config.get("kv_connector_module_path")
        if module is not None:
            file = ROOT / Path(*module.split("."))
            assert (file / "__init__.py").exists() or file.with_suffix(".py").exists(), module


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"`?\bmake ([a-z-]+)`", page.read_text())}
    named |= {command[1] for command in shell_commands(README) if command[0] == "make"}
    assert {"demo", "test", "bench", "soak"} <= named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_readme_is_short_and_says_the_main_things_first() -> None:
    assert len(words(re.sub(r"```.*?```", "", README, flags=re.S))) <= README_WORDS
    assert missing_answers(README) == []


def test_control_a_minute_without_an_answer_is_seen() -> None:
    assert missing_answers("word " * ONE_MINUTE_WORDS + README) != []
    assert missing_answers(README.replace("`vllm serve`", "it")) == ["how to start"]
    assert len(words("| a | [b](c.md) | - |")) == 2


def test_the_index_of_docs_leads_to_every_page() -> None:
    """In the index, each page has its own row that says when to read the page. README links to the index."""
    rows = INDEX.partition("## Pages")[2].partition("\n## ")[0]
    pages = re.findall(r"^\| \[([a-z-]+\.md)\]\(\1\) \| \S", rows, re.M)
    assert sorted(pages) == sorted(page.name for page in DOCS if page.name != "README.md")
    assert "(docs/README.md)" in README
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    linked = set(re.findall(r"\(docs/contributing/([a-z-]+\.md)\)", contributing))
    assert linked == {page.name for page in CONTRIBUTING}


@pytest.mark.parametrize(
    ("page", "folder"),
    [
        ("vllm", "adapters/vllm"),
        ("sglang", "adapters/sglang"),
        ("tensorrt-llm", "adapters/tensorrt_llm"),
        ("control-plane", "cache"),
        ("control-plane", "simulation"),
        ("disk-storage", "storage"),
        ("blending", "blend"),
    ],
)
def test_every_file_has_its_row_in_the_page_of_its_folder(page: str, folder: str) -> None:
    """In the page about a folder's package, every file of the folder has a row. One row may cover several files."""
    rows = [row for row in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if row.startswith("|")]
    named = {name.removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    files = {path.stem for path in (ROOT / "flexkv" / folder).glob("*.py")} - {"__init__"}
    assert len(files) > 3
    assert not sorted(files - named), f"add rows to the table of files in docs/{page}.md"


def test_folders_that_are_named_exist() -> None:
    pages = ("README.md", "CONTRIBUTING.md", "docs/README.md", "docs/architecture.md")
    for page in (ROOT / name for name in pages):
        for name in re.findall(
            r"`((?:flexkv|csrc|demo|benchmarks|configs|docs|tests)/[a-z_/]*)`", page.read_text()
        ):
            assert (ROOT / name).is_dir(), f"{page.name} names {name}"


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the table whose first line begins with `heading`, row by row."""
    lines = page.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Each row of README's first table is also a row of the H200's table in docs/benchmarks.md. Its cells are a name,
    and the times of a cold prompt and of a hit for three lengths."""
    rows = table_rows(README, "| time to first token, ms |")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    measured = [[row[i] for i in (0, 1, 2, 4, 5, 7, 8)] for row in table_rows(page, "| H200, ms |")]
    assert len(rows) >= 4
    for row in rows:
        assert row in measured
    default = rows[0]
    assert f"after {default[4]} ms instead of {default[3]} ms" in " ".join(README.split())
    zen = {row[0]: row for row in table_rows(page, "| Zen 5 | cold, ms |")}["flexkv, sync"]
    assert f"come after {zen[2]} ms instead of {zen[1]} ms." in " ".join(README.split())


def test_the_log_lines_of_the_vllm_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    host = TierCapacity("host tier", 1024, (KvGroup(128),), 512 << 10, "host.bytes")
    line = f"host tier: {host.words(PromptLimit(2048, 'max_model_len'))}, for 1 rank(s)"
    assert f"[flexkv.unit.build] {line}\n" in page
    assert line in " ".join((ROOT / "docs" / "models.md").read_text().split())
    _, package = next(iter(name_this_package()))
    assert f"] {package.rpartition(' ')[0]} /" in page


def test_variables_that_the_docs_name_exist() -> None:
    known = {*map(environment_name, (*setting_fields(), *ALIASES)), *OTHER_VARIABLES}
    wrong = {"FLEXKV_SERVICE_HOST", "FLEXKV_CPU_CACHE_GB", "FLEX_KV_HOST_BYTES"}
    for page in PAGES:
        named = set(re.findall(r"\bFLEX_?KV_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
        assert named - known - wrong == set(), page.name


def test_settings_that_the_docs_name_exist() -> None:
    sections = "|".join({key.split(".")[0] for key in setting_fields()})
    files = {"index.sqlite", "index.damaged", "index.other", "identity.py", "load.py"}
    for page in PAGES:
        named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?![./(])", page.read_text()))
        assert named - {*setting_fields()} - files == set(), page.name


def test_the_container_page_sets_what_the_code_takes() -> None:
    """On the page about containers, Docker's command line and the pod's specification set the same variables, and
    flexkv accepts them.
    """
    text = (ROOT / "docs" / "containers.md").read_text()
    (pod,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (container,) = yaml.safe_load(pod)["spec"]["containers"]
    in_pod = {row["name"]: row["value"] for row in container["env"]}
    in_docker = dict(re.findall(r"-e (FLEXKV_\w+)=(\S+)", text))
    assert in_pod == in_docker
    config = load_config(None, in_pod)
    assert config.disk.folders == ("/cache",) == tuple(row["mountPath"] for row in container["volumeMounts"])
    assert config.host.bytes == 64 << 30
    with pytest.raises(ConfigError, match=r"host\.bytes"):
        load_config(None, {**in_pod, "FLEXKV_HOST_BYTES": "64Gi"})


def test_the_examples_of_bytes_per_token_are_right() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    base = {"num_hidden_layers": 32, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for config in (base, base | {"num_hidden_layers": 80}, latent):
        size = ModelSize._of({**config, "max_position_embeddings": 4096, "dtype": "bfloat16"}).token_bytes
        assert f"| {size:,} | {(100 << 30) // size:,} |" in text


def test_figures_are_whole() -> None:
    """Each figure is of a kind that GitHub can draw. In a sequence diagram every arrow connects two participants that
    are declared, and in a flowchart no node has two labels."""
    figures = [
        figure for page in PAGES for figure in re.findall(r"```mermaid\n(.*?)```", page.read_text(), re.S)
    ]
    assert len(figures) >= 2
    for figure in figures:
        kind, *lines = figure.strip().splitlines()
        assert kind.split()[0] in ("flowchart", "sequenceDiagram"), kind
        assert all(figure.count(a) == figure.count(b) for a, b in ("[]", "()"))
        if kind == "sequenceDiagram":
            named = {line.split()[1] for line in lines if line.strip().startswith("participant")}
            used = {name for line in lines for name in re.findall(r"^\s*(\w)->>(\w):", line) for name in name}
            assert used == named
        else:
            labelled = re.findall(r"\b(\w+)\[", re.sub(r'"[^"]*"', "", figure))
            assert len(labelled) == len(set(labelled))
