"""Builds the native test program of the variant in FLEXKV_CUDA / FLEXKV_SANITIZE and prints its path."""

from __future__ import annotations

from build_support.ninja_file import NinjaFile, Variant


def main() -> None:
    ninja = NinjaFile(Variant.from_environment())
    program = ninja.add_native_tests()
    ninja.run()
    print(program)


if __name__ == "__main__":
    main()
