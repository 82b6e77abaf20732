"""The data plane's Python interface: transfer graphs, the transfer engine that runs them, and the host pool."""
