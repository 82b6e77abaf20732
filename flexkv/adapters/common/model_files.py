"""Files beside a model's weights that decide its KV: what a processor does with images, how weights are quantised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flexkv.adapters.common.model_identity import plain_config
from flexkv.errors import ConfigError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What transformers' processors of images, videos and sounds are made from."""

MISTRAL_FILE = "tekken.json"
"""Mistral's tokenizer file, which has the settings of its processors in it."""

MISTRAL_SECTIONS = ("image", "audio", "multimodal")

NOT_OF_INPUTS = frozenset({"chat_template", "transformers_version"})
"""Entries of a processor's file that decide tokens, which are in each key, or nothing."""

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""How weights are quantised, where the model's own configuration does not say it."""

MOST_BYTES = 64 << 20
"""Largest file that is read. The largest that we know is a tokenizer of 20 MiB."""


def processor_files(model: str, revision: str | None = None) -> dict[str, Any]:
    """What the files of a model's processor say, by their names; without the chat template.

    Args:
        model: folder, file in it, or hub name.
        revision: of a hub name: the commit, else a branch or tag.

    Raises:
        ConfigError: a file is too large or cannot be read.
    """
    found = {name: _settings(name, content) for name, content in _contents(model, revision, PROCESSOR_FILES)}
    for name, content in _contents(model, revision, (MISTRAL_FILE,)):
        said = _settings(name, content)
        found[name] = {part: said.get(part) for part in MISTRAL_SECTIONS} if isinstance(said, dict) else said
    return found


def quantization_files(model: str, revision: str | None = None) -> dict[str, Any]:
    """What files beside the weights say of their quantisation. Arguments and errors as `processor_files`."""
    return {
        name: _settings(name, content) for name, content in _contents(model, revision, QUANTIZATION_FILES)
    }


def code_files(model: str) -> dict[str, str]:
    """Digests of the Python files in a model's folder, by their names; none of a hub name, whose commit tells them.

    Raises:
        ConfigError: a file is too large or cannot be read.
    """
    folder = Path(model)
    files = sorted(folder.glob("*.py")) if folder.is_dir() else []
    return {file.name: hashlib.sha256(_read(file)).hexdigest() for file in files}


def file_digest(path: str) -> str:
    """SHA-256 of one small file, in hexadecimal digits.

    Raises:
        ConfigError: it is too large or cannot be read.
    """
    return hashlib.sha256(_read(Path(path))).hexdigest()


def _contents(model: str, revision: str | None, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Those of the files that are there."""
    place = Path(model)
    if place.exists():
        folder = place if place.is_dir() else place.parent
        files = [folder / name for name in names]
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        # Behind the repository's name may follow which of its models is meant, such as `:Q4_K_M`.
        repository = model.partition(":")[0]
        try:
            cached = [try_to_load_from_cache(repository, name, revision=revision or "main") for name in names]
        except HFValidationError:
            # An object store's name, or a folder of another machine: no file of it can be read here.
            return []
        # What the hub's cache knows to be missing is told by an object, what it knows nothing of by None.
        files = [Path(file) for file in cached if isinstance(file, str)]
    return [(file.name, _read(file)) for file in files if file.is_file()]


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
    """What a file says; its digest where it is no JSON."""
    try:
        said = json.loads(content)
    except ValueError:
        return f"{name}: {hashlib.sha256(content).hexdigest()}"
    if not isinstance(said, dict):
        return plain_config(said)
    return plain_config({key: value for key, value in said.items() if key not in NOT_OF_INPUTS})
