"""Where vLLM's built-in FlexKVConnectorV1 looks."""
