"""The disk tier: slabs of slot images, the index that survives a crash, and their checks."""
