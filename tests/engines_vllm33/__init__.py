"""vLLM 0.33's own Python (engine, scheduler, connector interface, Model Runner V2) on a mocked CUDA, with flexkv."""
