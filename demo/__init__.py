"""A demo that runs conversations through a real engine with flexkv, and the tools to start and control such an
engine.
"""
