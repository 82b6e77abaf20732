"""Build helpers used by setup.py: toolchain probes and the ninja file writer."""
