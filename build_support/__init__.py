"""What setup.py, the Makefile and the tests build with: preflight, environments, toolchains, ninja files."""
