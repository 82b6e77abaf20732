"""Build tools of setup.py, the Makefile and the tests: preflight, environments, toolchains, ninja files."""
