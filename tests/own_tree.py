"""The tree that this process runs from, for tests that start another Python: under a sanitizer it is a copy."""

from __future__ import annotations

from pathlib import Path

import flexkv

# Links stay: those of the copy lead to the working tree, whose native core no sanitizer looks into.
OWN_TREE = Path(flexkv.__file__).parent.parent
