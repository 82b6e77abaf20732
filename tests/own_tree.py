"""The tree that this process runs from, for tests that start another Python: under a sanitizer it is a copy."""

from __future__ import annotations

from pathlib import Path

import flexkv

# Links are kept: the copy's links lead to the working tree, and no sanitizer instruments the native core there.
OWN_TREE = Path(flexkv.__file__).parent.parent
