"""The root of the tree from which this process runs, for tests that start another Python. Under a sanitizer it is a
copy of the working tree.
"""

from __future__ import annotations

from pathlib import Path

import flexkv

# Links must not be resolved: the links of a sanitizer's copy lead to the working tree, whose native core is built
# without a sanitizer.
OWN_TREE = Path(flexkv.__file__).parent.parent
