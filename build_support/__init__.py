"""Tools for setup.py, the Makefile and the tests. They check the machine, make environments, and build the core."""
