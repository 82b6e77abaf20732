"""Tools with which setup.py, the Makefile and the tests check the machine, make environments and build the native
core.
"""
