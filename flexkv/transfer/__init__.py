"""The data plane's Python face: transfer graphs, the engine that runs them, and the host pool."""
