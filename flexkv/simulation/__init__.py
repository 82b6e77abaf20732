"""Simulations without an engine. They call the real cache manager in random order and inject faults of ranks, disks and
remote stores."""
