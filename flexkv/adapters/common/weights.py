"""What tells one set of weights from another without reading all of it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
"""64 samples of 4 KiB spread over each weights file: a fine-tune changes nearly every tensor, so that one of them
differs is practically certain, and a model of a hundred files is read in well under a second."""

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
COMMIT_PREFIX = "commit:"
COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
PINNED = re.compile(r"[0-9a-f]{40}")


def weights_identity(model: str, revision: str | None, resolved: str | None = None) -> str:
    """A string that differs for different weights of the model: the hub's commit and the place in it, else a digest of
    sampled content.

    Args:
        model: a folder, a file, or a hub name; a hub name stands for itself with its commit.
        revision: of a hub name: a commit, or a branch or tag that may move.
        resolved: what the engine found behind the revision.

    Raises:
        ConfigError: the folder holds no weights that we know, or nothing says which commit of the hub is meant; says
            what to set.
    """
    path = Path(model)
    place = os.path.normpath(model)
    if commit := COMMIT.search(place):
        # One commit may hold several adapters, or one model in several quantisations.
        return f"{COMMIT_PREFIX}{commit.group(1)}{place[commit.end(1) :]}"
    if not path.exists():
        commit_of_hub = resolved or (revision if revision and PINNED.fullmatch(revision) else None)
        if commit_of_hub is None:
            raise ConfigError(
                f"the weights are {model} at revision {revision or 'of the default branch'}, which may move, so what "
                "was stored before would be served after; set identity.model, or a commit (40 hex digits) as the "
                "engine's revision"
            )
        return f"hub:{model}@{commit_of_hub}"
    return sampled_identity(path)


def resolved_commit(model: Any) -> str | None:
    """The hub's commit that an engine has found at load, which a branch's name does not tell; None where it says none.

    Args:
        model: an engine's configuration of the model, which has transformers' own in `hf_text_config`, and mostly in
            `hf_config` as well.
    """
    configs = (model.hf_text_config, getattr(model, "hf_config", None))
    return next((commit for config in configs if (commit := getattr(config, "_commit_hash", None))), None)


def sampled_identity(path: Path) -> str:
    """A digest of samples of the weights in a file or folder.

    Raises:
        ConfigError: the folder holds no weights that we know; says what to set.
        OSError: a file cannot be read.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise ConfigError(
            f"{path} holds no weights ({', '.join(WEIGHT_PATTERNS)}), so nothing tells it from other models; "
            "set identity.model to a name or revision of the weights"
        )
    digest = hashlib.sha256()
    for file in files:
        _sample(file, digest)
    return f"sampled:{digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    for pattern in WEIGHT_PATTERNS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _sample(file: Path, digest: hashlib._Hash) -> None:
    """Name, size, the first bytes (for safetensors: the header's begin) and samples spread evenly over the file."""
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
    with file.open("rb") as content:
        for start in range(0, size, step):
            content.seek(start)
            digest.update(content.read(SAMPLE_BYTES))
