"""Reads the files beside a model's weights that also determine its KV: the settings of image processors and of the
quantisation, and the model's Python code.

The files are read only if the model is a folder or file on this machine. If the model is given by its name on Hugging
Face's hub, they are not read: which of the hub's files a machine has in its cache depends on what it loaded before, and
that must not affect a key. The commit that identifies the weights identifies these files too. If the user names the
weights instead (`identity.model`), the commit enters the key in place of the files; if no commit is known, the key
contains neither.
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
"""Entries of a processor's file that do not affect the processing of inputs. The chat template determines only tokens,
which are in each key anyway."""

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that describe how the weights are quantised, for models whose `config.json` does not describe this."""

MOST_BYTES = 64 << 20
"""Size of the largest file that is read, in bytes. The largest known file is a tokenizer of 20 MiB."""


def model_config(model: str) -> dict[str, Any]:
    """The content of the model's `config.json`; empty if the model is not a folder or the folder has no such file.

    Raises:
        ConfigError: the file cannot be read, or does not hold a model's configuration.
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
    """The settings in the files of a model's processors, by file name, without the entries in NOT_OF_INPUTS.

    Args:
        model: the model's folder, a file in it, or a hub name.
        revision: for a hub name, a commit, branch or tag; None if unknown.
        named: whether the user names the weights, so that the key does not contain their commit.

    Raises:
        ConfigError: a file is too large or cannot be read.
    """
    found = {name: _settings(name, content) for name, content in _contents(model, PROCESSOR_FILES)}
    for name, content in _contents(model, (MISTRAL_FILE,)):
        said = _settings(name, content)
        found[name] = {part: said.get(part) for part in MISTRAL_SECTIONS} if isinstance(said, dict) else said
    return found | _commit_of(model, revision, named)


def quantization_files(model: str, revision: str | None = None, named: bool = False) -> dict[str, Any]:
    """The settings in the files that describe the quantisation of the weights, by file name. Arguments and errors are
    those of `processor_files`.
    """
    found = {name: _settings(name, content) for name, content in _contents(model, QUANTIZATION_FILES)}
    return found | _commit_of(model, revision, named)


def code_files(model: str, revision: str | None = None, named: bool = False) -> dict[str, str]:
    """Digests of the Python files in a model's folder, by file name. Arguments and errors are those of
    `processor_files`."""
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
    """Name and content of each file in `names` that exists beside the model's weights; empty for a hub name."""
    place = Path(model)
    if not place.exists():
        return []
    folder = place if place.is_dir() else place.parent
    return [(name, _read(folder / name)) for name in names if (folder / name).is_file()]


def _commit_of(model: str, revision: str | None, named: bool) -> dict[str, str]:
    """An entry for the key with the hub's commit, which takes the place of files that are not read. Empty if the key
    contains the commit anyway, if no commit is known, or if the files are on this machine and were read."""
    if not named or revision is None or not PINNED.fullmatch(revision) or Path(model).exists():
        return {}
    return {"commit": revision}


def _read(file: Path) -> bytes:
    """The file's content.

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
    """The settings in a JSON file without the entries in NOT_OF_INPUTS; name and digest of the file if it is not
    JSON."""
    try:
        said = json.loads(content)
    except ValueError:
        return f"{name}: {hashlib.sha256(content).hexdigest()}"
    if not isinstance(said, dict):
        return plain_config(said)
    return plain_config({key: value for key, value in said.items() if key not in NOT_OF_INPUTS})
