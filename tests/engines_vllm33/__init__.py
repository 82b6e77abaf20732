"""Tests with vLLM 0.33's own Python code (engine, scheduler, connector interface, Model Runner V2) on a mocked CUDA."""
