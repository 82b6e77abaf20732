"""The package from which vLLM's built-in `FlexKVConnectorV1` imports its implementation."""
