"""Builds the native test program of a variant.

If run as a program, this module builds the variant that FLEXKV_CUDA and FLEXKV_SANITIZE select, and prints the path of
the test program.
"""

from __future__ import annotations

from pathlib import Path

from build_support.ninja_file import NinjaFile, Variant


def build(variant: Variant) -> Path:
    """Builds the test program of `variant` and returns its path.

    Raises:
        subprocess.CalledProcessError: the build failed.
    """
    ninja = NinjaFile(variant)
    program = ninja.add_native_tests()
    ninja.run()
    return program


def main() -> None:
    print(build(Variant.from_environment()))


if __name__ == "__main__":
    main()
