"""One adapter per engine: block tables in, transfer graphs out. No engine is imported outside its own adapter."""
