"""Plugins: programs of the user that run beside a unit and its ranks in separate processes, and their calls to the
unit.
"""
