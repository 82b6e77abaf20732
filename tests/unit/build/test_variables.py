"""If some code reads a variable FLEXKV_*, the variable is a setting, or the docs explain its purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flexkv.adapters.common.metric_report import FOLDER_VARIABLE
from flexkv.config.model import setting_fields
from flexkv.config.names import ALIASES, environment_name
from flexkv.config.sources import OTHER_VARIABLES

ROOT = Path(__file__).resolve().parents[3]
# Matches reads of the environment: os.environ[...], environ.get(...), getenv(...), and $${NAME...} in the Makefile.
READ = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\(|\$\$?\{)\s*["']?(FLEXKV_[A-Z0-9_]+)""")

PATTERNS = (
    *(f"{folder}/**/*.py" for folder in ("flexkv", "build_support", "demo", "benchmarks", "tests")),
    *(f"{folder}/**/*.{suffix}" for folder in ("csrc", "tests/native") for suffix in ("cpp", "h", "cu")),
    "setup.py",
    "Makefile",
    ".ci/run",
)


ANY_READ = re.compile(r"\b(?:os\.environ|os\.getenv|(?:secure_)?getenv)\b(?!`)")
READERS = {
    "flexkv/config/load.py": "the settings",
    "flexkv/adapters/sglang/identity.py": "`SGLANG_PP_LAYER_PARTITION`",
    "flexkv/adapters/tensorrt_llm/api.py": "`RANK_VARIABLES`",
    "flexkv/adapters/common/metric_report.py": "`FOLDER_VARIABLE`",
    "flexkv/remote/mooncake/client.py": "`CLIENT_ENVIRONMENT`",
    "flexkv/plugins/client.py": "the name of its unit's socket, in a plugin's process",
    "flexkv/plugins/launcher.py": "all, for the process that it starts",
    "flexkv/remote/process.py": "all, for the process that it starts",
    "flexkv/peers/runtime_folder.py": "`XDG_RUNTIME_DIR`, the folder of the user's own sockets (docs/one-cache.md)",
    "flexkv/cli/remote/child.py": "all, for the process that it starts",
}
"""For each file of the product that reads the environment, the variables that it reads. Among them are variables of
launchers (docs/tensorrt-llm.md), one of SGLang (docs/identity.md), one that prometheus_client reads too
(docs/metrics.md), and those that Mooncake's library reads. Files that start a process read all variables, because the
process inherits them.
"""


def reads() -> Iterator[tuple[str, str]]:
    """Yields (file, variable) for every read of a variable whose name begins with FLEXKV_."""
    for pattern in PATTERNS:
        for path in ROOT.glob(pattern):
            yield from ((str(path.relative_to(ROOT)), name) for name in READ.findall(path.read_text()))


def test_variables_are_known() -> None:
    found = list(reads())
    assert ("build_support/ninja_file.py", "FLEXKV_SANITIZE") in found
    known = {*map(environment_name, (*setting_fields(), *ALIASES)), *OTHER_VARIABLES}
    assert [(path, name) for path, name in found if name not in known] == []


def test_settings_are_read_in_one_place() -> None:
    files = [
        *(ROOT / "flexkv").rglob("*.py"),
        *(path for path in (ROOT / "csrc").rglob("*.*") if path.is_file()),
    ]
    readers = {str(path.relative_to(ROOT)) for path in files if ANY_READ.search(path.read_text())}
    assert readers == set(READERS)
    assert ANY_READ.search("std::getenv(name)")
    api = (ROOT / "flexkv/adapters/tensorrt_llm/api.py").read_text()
    names = re.findall(r'"(\w+)"', re.findall(r"RANK_VARIABLES = \((.*?)\)", api)[0])
    assert f"`{FOLDER_VARIABLE}`" in (ROOT / "docs/metrics.md").read_text()
    page = (ROOT / "docs/tensorrt-llm.md").read_text()
    assert len(names) > 3
    assert [name for name in names if f"`{name}`" not in page] == []
