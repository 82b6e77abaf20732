"""A demo that runs conversations through a real engine with flexkv. Also has the tools to start and control a real
engine, which tests and benchmarks use.
"""
