"""The exceptions flexkv raises. Expected outcomes (a miss, a full tier, a failed page) are statuses, not exceptions."""

from __future__ import annotations


class FlexKVError(Exception):
    """Base of every exception flexkv raises on purpose."""


class ConfigError(FlexKVError, ValueError):
    """A setting is unknown or has a value that is not allowed; names it, its source and what is allowed."""


class GeometryError(FlexKVError, ValueError):
    """A KV pool's shape, dtype, strides, alignment or block count is not what the layout needs."""


class CapacityError(FlexKVError, MemoryError):
    """A pool or buffer cannot hold even one of its units."""


class BlockRangeError(FlexKVError, IndexError):
    """A block, slot or layer number lies outside its pool."""


class TokenError(FlexKVError, TypeError):
    """A token id is not an integer in [0, 2**32)."""


class KeySchemeError(FlexKVError, ValueError):
    """Block keys have the wrong length, or come from a hash that is not cryptographic."""


class NativeCoreError(FlexKVError, ImportError):
    """The native core was built from another version of the source than the package that imports it; names both."""


class ClosedError(FlexKVError, RuntimeError):
    """The engine, pool or manager was closed before this call."""


class ContractError(FlexKVError, AssertionError):
    """A caller broke a stated contract, or `check_integrity` found a broken invariant: a bug, not an event."""


class TransferError(FlexKVError, OSError):
    """Some blocks of a synchronous transfer did not arrive; names them and says why. The others did."""


class DiskError(FlexKVError, OSError):
    """A folder, slab or index of the disk tier cannot be used; names it, and what the system said."""


class StoreError(FlexKVError, OSError):
    """A store that machines share cannot be used as the settings say; names it, and what to do."""


class PluginCallError(FlexKVError, RuntimeError):
    """A plugin's call to its unit was refused, came to nothing in time, or found no unit; says why."""
