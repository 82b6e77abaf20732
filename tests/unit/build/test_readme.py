"""README and docs: what they say to type is understood, what they link to exists, what they claim is so."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from demo.engine_process import FLEXKV
from flexkv.config import load_config

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]+\]\(([^)#]*)(?:#([^)]*))?\)")


def shell_commands(text: str) -> list[list[str]]:
    """Every command of the text's bash blocks, as the shell would split it."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    words = [shlex.split(block, comments=True) for block in blocks]
    # A block's lines are split apart at what starts a command here.
    commands: list[list[str]] = []
    for word in (w for block in words for w in block):
        if word in ("make", "pip", "vllm", "python", "flexkv", "git"):
            commands.append([])
        commands[-1].append(word)
    return commands


def test_the_vllm_line_is_what_the_demo_and_the_tests_run() -> None:
    """But for the module path, which a working tree needs and an installed package does not."""
    (serve,) = (command for command in shell_commands(README) if command[:2] == ["vllm", "serve"])
    config = json.loads(serve[serve.index("--kv-transfer-config") + 1])
    assert config == {key: value for key, value in FLEXKV.items() if key != "kv_connector_module_path"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_transfer_config_is_one(page: Path) -> None:
    """Each JSON object that sets `kv_connector` parses, and its extra config is accepted."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_readme_leads_to_the_pages() -> None:
    """Each with a row of its own in the table of pages."""
    rows = README.partition("## More to read")[2].partition("\n## ")[0]
    linked = set(re.findall(r"^\| \[(docs/[a-z-]+\.md)\]\(\1\) \| \S", rows, re.M))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def test_folders_that_are_named_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        for name in re.findall(
            r"`((?:flexkv|csrc|demo|benchmarks|configs|docs|tests)/[a-z_/]*)`", page.read_text()
        ):
            assert (ROOT / name).is_dir(), f"{page.name} names {name}"
