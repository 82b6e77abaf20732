"""flexkv keeps the KV cache of inference engines in host memory, on local disks and in a store that machines share.

docs/architecture.md describes its parts and says which file to open for a change.
"""

from flexkv.native_core import check_native_core

__version__ = "0.1.0"

check_native_core()
