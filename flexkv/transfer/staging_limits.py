"""Names, for the log, the limit that determined the number of staging slots."""

from __future__ import annotations

from flexkv.config.sizes import format_size


def staging_cut(slots: int, slot_bytes: int, max_blocks: int, max_bytes: int) -> str:
    """One line that names the limit that left fewer slots than `gds.max_staging_blocks` allows; empty if none did.

    Args:
        slots, slot_bytes: how the native core divided its staging; no slots if it needs none.
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
