"""Files beside a model's weights that determine its KV: the processing of images, the quantisation of the weights.

They are read from a folder only. Which of a hub's files are in a machine's cache depends on what was loaded there
before, and must not enter a key: the commit that names the weights also names the files. If the user names the weights
(`identity.model`), the commit enters the key on behalf of the files; if no commit is known, nothing does.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.weights import PINNED
from flexkv.errors import ConfigError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files from which transformers builds its processors of images, videos and audio."""

MISTRAL_FILE = "tekken.json"
"""Mistral's tokenizer file, which also holds the settings of its processors."""

MISTRAL_SECTIONS = ("image", "audio", "multimodal")

NOT_OF_INPUTS = frozenset({"chat_template", "transformers_version"})
"""Entries of a processor's file that decide nothing, or only tokens, which are in each key anyway."""

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say how weights are quantised where the model's own configuration does not."""

MOST_BYTES = 64 << 20
"""Largest file that is read, in bytes. The largest that we know is a tokenizer of 20 MiB."""


def model_config(model: str) -> dict[str, Any]:
    """The model's own `config.json` where the model is a folder that has one; otherwise empty.

    Raises:
        ConfigError: the file cannot be read, or holds no model's configuration.
    """
    file = Path(model) / "config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: holds a {type(found).__name__}, not a model's configuration")
    return found


def processor_files(model: str, revision: str | None = None, named: bool = False) -> dict[str, Any]:
    """The settings in the files of a model's processor, by file name; without the chat template.

    Args:
        model: folder, file in it, or hub name.
        revision: for a hub name, the commit, or else a branch or tag.
        named: the user names the weights, so the key has no commit for them.

    Raises:
        ConfigError: a file is too large or cannot be read.
    """
    found = {name: _settings(name, content) for name, content in _contents(model, PROCESSOR_FILES)}
    for name, content in _contents(model, (MISTRAL_FILE,)):
        said = _settings(name, content)
        found[name] = {part: said.get(part) for part in MISTRAL_SECTIONS} if isinstance(said, dict) else said
    return found | _commit_of(model, revision, named)


def quantization_files(model: str, revision: str | None = None, named: bool = False) -> dict[str, Any]:
    """The settings in files that describe the quantisation of the weights. Arguments and errors as for
    `processor_files`.
    """
    found = {name: _settings(name, content) for name, content in _contents(model, QUANTIZATION_FILES)}
    return found | _commit_of(model, revision, named)


def code_files(model: str, revision: str | None = None, named: bool = False) -> dict[str, str]:
    """Digests of the Python files in a model's folder, by file name. Arguments and errors as for `processor_files`."""
    folder = Path(model)
    files = sorted(folder.glob("*.py")) if folder.is_dir() else []
    found = {file.name: hashlib.sha256(_read(file)).hexdigest() for file in files}
    return found | _commit_of(model, revision, named)


def file_digest(path: str) -> str:
    """SHA-256 of one small file, in hexadecimal digits.

    Raises:
        ConfigError: the file is too large or cannot be read.
    """
    return hashlib.sha256(_read(Path(path))).hexdigest()


def _contents(model: str, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Name and content of each file that exists; empty for a hub name."""
    place = Path(model)
    if not place.exists():
        return []
    folder = place if place.is_dir() else place.parent
    return [(name, _read(folder / name)) for name in names if (folder / name).is_file()]


def _commit_of(model: str, revision: str | None, named: bool) -> dict[str, str]:
    """The hub's commit, if it stands for files that are not read and nothing else in the key does."""
    if not named or revision is None or not PINNED.fullmatch(revision) or Path(model).exists():
        return {}
    return {"commit": revision}


def _read(file: Path) -> bytes:
    """
    Raises:
        ConfigError: the file is larger than `MOST_BYTES`, or cannot be read.
    """
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(
                f"{file} has {size} bytes; a file that describes a model has {MOST_BYTES} at most"
            )
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error}") from error


def _settings(name: str, content: bytes) -> Any:
    """The settings in a file; the file's digest if it is not JSON."""
    try:
        said = json.loads(content)
    except ValueError:
        return f"{name}: {hashlib.sha256(content).hexdigest()}"
    if not isinstance(said, dict):
        return plain_config(said)
    return plain_config({key: value for key, value in said.items() if key not in NOT_OF_INPUTS})
