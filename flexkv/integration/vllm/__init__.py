"""The package where vLLM's built-in FlexKVConnectorV1 looks for its implementation."""
