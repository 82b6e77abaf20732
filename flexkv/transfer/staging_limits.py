"""Which limit decided how many staging slots there are, for the log: the result does not show it."""

from __future__ import annotations

from flexkv.config.sizes import format_size


def staging_cut(slots: int, slot_bytes: int, max_blocks: int, max_bytes: int) -> str:
    """One line where there are fewer slots than `gds.max_staging_blocks` allows, naming what cut it; else empty.

    Args:
        slots, slot_bytes: as the native core divided its staging; no slots where none are needed.
        max_blocks: `gds.max_staging_blocks`.
        max_bytes: `gds.max_staging_bytes`.
    """
    if slots < 1 or slots >= max_blocks:
        return ""
    got = f"{slots} staging slots of {format_size(slot_bytes)}, {format_size(slots * slot_bytes)} together"
    asked = f"gds.max_staging_blocks = {max_blocks} asks for {format_size(max_blocks * slot_bytes)}"
    if slots == max_bytes // slot_bytes:
        return f"{got}: {asked}, and gds.max_staging_bytes = {format_size(max_bytes)} leaves no more"
    return f"{got}: {asked}, and what a lane moves at once takes no more"
