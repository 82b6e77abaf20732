"""vLLM loads flexkv's plugin in each of its processes. The plugin costs little, imports nothing early, and does no harm
if something is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexkv.adapters.vllm.plugin import FACTORY

ROOT = Path(__file__).resolve().parents[3]
REGISTER = "from flexkv.adapters.vllm.plugin import register; register(); register()"
GOOD = """
class KVConnectorFactory:
    _registry = {}
    @classmethod
    def register_connector(cls, name, module_path, class_name):
        cls._registry[name] = (module_path, class_name)
"""
OF_ANOTHER_VERSION = "class KVConnectorFactory: pass"
HASHER_MODULE = """
class MultiModalHasher:
    @classmethod
    def hash_kwargs(cls, name, /, **values):
        return name
"""
HASH = "print(h.hash_kwargs('a', model_id='m', image='cat'), h.hash_kwargs('b', model_id='m', image=b'cat'))"
SHOW = f"import {FACTORY} as factory; print(factory.KVConnectorFactory._registry)"
KNOWN = "{'FlexKVConnector': ('flexkv.adapters.vllm', 'FlexKVConnector')}"


def run(program: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program in a separate Python process that searches `paths` first."""
    found = [str(path) for path in (*paths, ROOT)]
    begin = f"import sys; sys.path[:0] = {found!r}\n"
    command = [sys.executable, "-c", begin + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Makes a folder with a package `vllm` that contains only vLLM's factory of connectors."""
    folder = tmp_path
    for part in FACTORY.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "factory.py").write_text(GOOD)
    return tmp_path


def rewrite(stand_in: Path, text: str) -> None:
    stand_in.joinpath(*FACTORY.split(".")).with_suffix(".py").write_text(text)


def test_a_process_without_a_connector_imports_nothing_for_it() -> None:
    heavy = "print([name for name in ('torch', 'vllm', 'numpy', 'pydantic') if name in sys.modules])"
    done = run(f"{REGISTER}; {heavy}")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("program", [f"{REGISTER}\n{SHOW}", f"import {FACTORY}\n{REGISTER}\n{SHOW}"])
def test_the_name_is_known_whenever_the_factory_is_imported(stand_in: Path, program: str) -> None:
    done = run(program, stand_in)
    assert (done.stdout.strip(), done.stderr) == (KNOWN, "")


def test_hashes_of_clients_names_are_marked_whenever_the_hasher_is_imported(stand_in: Path) -> None:
    (stand_in / "vllm/multimodal").mkdir()
    (stand_in / "vllm/multimodal/hasher.py").write_text(HASHER_MODULE)
    for begin in (REGISTER, f"import vllm.multimodal.hasher\n{REGISTER}"):
        done = run(f"{begin}\nfrom vllm.multimodal.hasher import MultiModalHasher as h\n{HASH}", stand_in)
        assert (done.stdout.split(), done.stderr) == (["client-a", "b"], "")


def test_a_name_that_is_taken_stays(stand_in: Path) -> None:
    rewrite(stand_in, GOOD.replace("{}", "{'FlexKVConnector': 'of somebody else'}"))
    done = run(f"{REGISTER}\n{SHOW}", stand_in)
    assert done.stdout.strip() == "{'FlexKVConnector': 'of somebody else'}"


def test_a_factory_of_another_kind_is_a_warning_that_names_flexkv(stand_in: Path) -> None:
    rewrite(stand_in, OF_ANOTHER_VERSION)
    done = run(f"{REGISTER}\nimport {FACTORY}; print('the engine goes on')", stand_in)
    assert done.stdout.strip() == "the engine goes on"
    assert "flexkv: vLLM does not know the connector by its name (AttributeError" in done.stderr
    assert '"kv_connector_module_path":"flexkv.adapters.vllm"' in done.stderr


def test_a_factory_that_cannot_be_imported_fails_as_without_the_plugin(stand_in: Path) -> None:
    rewrite(stand_in, "raise OSError('its own trouble')")
    attempt = f"for _ in range(2):\n    try: import {FACTORY}\n    except OSError as error: print(error)"
    assert run(f"{REGISTER}\n{attempt}", stand_in).stdout.splitlines() == ["its own trouble"] * 2
