"""The data plane's Python face: transfer graphs, the transfer engine that runs them, and the host pool."""
