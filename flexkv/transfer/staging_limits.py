"""Makes the log's line about the limit that determined the number of staging slots."""

from __future__ import annotations

from flexkv.config.sizes import format_size


def staging_cut(slots: int, slot_bytes: int, max_blocks: int, max_bytes: int) -> str:
    """Returns one line that names the limit that keeps the number of staging slots below `gds.max_staging_blocks`;
    empty if the number is not below it.

    Args:
        slots, slot_bytes: number and size of the native core's staging slots; 0 slots if it needs no staging buffer.
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
