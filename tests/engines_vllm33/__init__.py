"""Tests with the Python code of vLLM 0.33 (engine, scheduler, connector interface, Model Runner V2) on a mocked
CUDA."""
