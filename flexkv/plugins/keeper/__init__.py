"""The keeper: a process between an engine and its plugins. It starts, restarts and ends the plugins, and limits their
output.
"""
