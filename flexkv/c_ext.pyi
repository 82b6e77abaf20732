"""The native core. One section an area, kept by whoever keeps csrc/bindings/bind_<area>.cpp."""

# --- module -----------------------------------------------------------------------------------------------------------

__variant__: str
"""`cpu` or `cuda`, with `-address` or `-thread` for a sanitizer build."""

def build_info() -> dict[str, bool | str | int]:
    """What this module was built with: cuda, sanitizer, compiler, cpp_standard."""

# --- layout -----------------------------------------------------------------------------------------------------------
