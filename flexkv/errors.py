"""The exceptions that flexkv raises. Expected outcomes, such as a miss, a full tier or a failed page, are statuses
instead."""

from __future__ import annotations


class FlexKVError(Exception):
    """Base class of all exceptions that flexkv defines."""


class ConfigError(FlexKVError, ValueError):
    """A setting is unknown or has a value that is not allowed. The message names the setting, where it was set, and
    what is allowed."""


class GeometryError(FlexKVError, ValueError):
    """A shape, dtype, stride, size, alignment or count of a KV pool or of pages is not what the layout needs, or pages
    cannot be converted exactly.
    """


class CapacityError(FlexKVError, MemoryError):
    """There is not enough memory, disk space or another resource, or a pool or buffer is too small for one item."""


class BlockRangeError(FlexKVError, IndexError):
    """The number of a block, slot, place, group or layer is outside the allowed range."""


class TokenError(FlexKVError, TypeError):
    """A token id is not an integer in [0, 2**32)."""


class KeySchemeError(FlexKVError, ValueError):
    """Block keys, or the data from which they are made, have the wrong type or length, or come from a hash that is not
    cryptographic."""


class NativeCoreError(FlexKVError, ImportError):
    """The native core is missing, or was built from another version of the source than this package. The message says
    which of the two.
    """


class ClosedError(FlexKVError, RuntimeError):
    """A call was made on a transfer engine, pool or manager that is already closed."""


class ContractError(FlexKVError, AssertionError):
    """A caller broke a documented contract, or `check_integrity` found a broken invariant. Both are bugs."""


class TransferError(FlexKVError, OSError):
    """Some blocks of a synchronous transfer did not arrive, and all other blocks did. The message lists the failed
    blocks, with the reason.
    """


class DiskError(FlexKVError, OSError):
    """A folder, slab or index of the disk tier cannot be used. The message names the folder, slab or index, and the
    system's error.
    """


class StoreError(FlexKVError, OSError):
    """A store that machines share cannot be used with these settings. The message names the store and what to do."""


class PluginCallError(FlexKVError, RuntimeError):
    """A plugin's call to its unit was refused or timed out, or there is no such unit. The message says why."""
