"""Names a model's weights by their commit on Hugging Face's hub, or by their content."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError
from flexkv.weights.files import NAMED, WeightsContent, weight_files
from flexkv.weights.fingerprint import sampled_identity

COMMIT_PREFIX = "commit:"
HUB_PREFIX = "hub:"
NO_COMMIT = "default"
"""Placeholder for the commit of additional weights, such as a draft model's, that are given by a hub name. If the
engine has no argument for their commit, nothing identifies these weights permanently."""

BLOBS = "blobs"
"""Name of the folders of the hub's cache that hold the files themselves; a commit's folder has links to the files."""

COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
PINNED = re.compile(r"[0-9a-f]{40}")


def weights_identity(model: str, revision: str | None, resolved: str | None = None) -> str:
    """A string that identifies weights: the hub's commit and the path in it or, if no commit is known, a digest of
    samples of the content.

    Args:
        model: a folder, a file, or a hub name; a hub name enters the string together with its commit.
        revision: for a hub name, a commit, or a branch or tag that may move; None for the default branch.
        resolved: the commit that the engine found for the revision; None if unknown.

    Raises:
        ConfigError: the folder holds no weights of a known format, or the commit of a hub name is unknown. The message
            says what to set.
    """
    return _name_of(model, revision, resolved) or sampled_identity(Path(model))


def weights_content(model: str, revision: str | None, resolved: str | None = None) -> WeightsContent:
    """The weights that must be read completely, because no commit identifies them. Arguments and errors are those of
    `weights_identity`.
    """
    name = _name_of(model, revision, resolved)
    if not name:
        return WeightsContent((model,))
    if name.startswith(HUB_PREFIX) and not PINNED.fullmatch(name.rpartition("@")[2]):
        return WeightsContent(
            unnamed=f"the weights are {name.removeprefix(HUB_PREFIX)}, which may move; set identity.model, or a commit "
            "(40 hex digits) as the engine's revision"
        )
    return NAMED


def _name_of(model: str, revision: str | None, resolved: str | None) -> str:
    """A name for the weights that is found without reading their content; empty if there is none.

    The folder of a commit in the hub's cache has such a name if its files are links to the cache's blobs: the cache
    names each blob by a digest of its content, so nobody can edit a blob in place without breaking the cache. A folder
    that has a commit's name but holds the files themselves, such as a copy, is treated like any other folder.

    Raises:
        ConfigError: the commit of a hub name is unknown.
    """
    path = Path(model)
    place = os.path.normpath(model)
    if (commit := COMMIT.search(place)) and (not path.exists() or _is_of_hub_cache(path)):
        # The path in the commit is part of the name, because one commit may hold several adapters, or one model in
        # several quantisations.
        return f"{COMMIT_PREFIX}{commit.group(1)}{place[commit.end(1) :]}"
    if path.exists():
        return ""
    commit_of_hub = resolved or (revision if revision and PINNED.fullmatch(revision) else None)
    if commit_of_hub is None:
        raise ConfigError(
            f"the weights are {model} at revision {revision or 'of the default branch'}, which may move, so what "
            "was stored before would be served after; set identity.model, or a commit (40 hex digits) as the "
            "engine's revision"
        )
    return f"{HUB_PREFIX}{model}@{commit_of_hub}"


def _is_of_hub_cache(path: Path) -> bool:
    """Whether every weights file in the folder is a link into the hub's cache. Also true if there is no weights file,
    because then only the commit identifies the files that the engine loads.
    """
    try:
        files = weight_files(path)
    except ConfigError:
        return True
    except OSError:
        return False  # the code that reads the files then reports the error
    return all(
        file.is_symlink() and os.path.basename(os.path.dirname(os.readlink(file))) == BLOBS for file in files
    )


def resolved_commit(model: Any) -> str | None:
    """The commit on Hugging Face's hub from which an engine loaded the model, even if the user asked for a branch; None
    if unknown.

    Args:
        model: the engine's configuration of the model. It has transformers' configuration as `hf_text_config`, and
            usually also as `hf_config`.
    """
    # With vLLM's `--hf-config-path`, the commit is that of the configuration's repository, not of the weights'.
    config_path = getattr(model, "hf_config_path", None)
    if config_path and config_path != model.model:
        return None
    configs = (model.hf_text_config, getattr(model, "hf_config", None))
    return next((commit for config in configs if (commit := getattr(config, "_commit_hash", None))), None)
