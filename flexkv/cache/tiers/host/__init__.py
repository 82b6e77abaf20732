"""Host memory: the hub that every other tier reads into and is written from."""
