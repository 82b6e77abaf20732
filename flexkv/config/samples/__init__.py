"""Sample files with comments: settings of flexkv, and for each engine a configuration that attaches flexkv."""

from __future__ import annotations

from importlib.resources import files

from flexkv.errors import ConfigError

SAMPLES = {
    "vllm.yaml": "settings beside vLLM",
    "sglang.yaml": "settings beside SGLang",
    "tensorrt-llm.yaml": "settings beside TensorRT-LLM",
    "laptop.yaml": "settings for a small machine without a GPU",
    "one-gpu-node.yaml": "settings for a node that two engines share, with a disk tier",
    "disk.yaml": "settings of a disk tier on two SSDs",
    "gds.yaml": "settings of GPUDirect Storage",
    "cluster.yaml": "settings of engines on several machines that share a store",
    "engine-vllm.json": "vLLM's --kv-transfer-config",
    "engine-sglang.yaml": "SGLang's --config",
    "engine-tensorrt-llm.yaml": "TensorRT-LLM's --extra_llm_api_options",
}
"""Maps each file to its description."""

ENGINE_FILES = tuple(name for name in SAMPLES if name.startswith("engine-"))
"""Samples that an engine reads. flexkv itself reads any other sample if FLEXKV_CONFIG contains the sample's path."""


def sample_text(name: str) -> str:
    """Returns the text of a sample. `name` is the name of its file, with or without the extension.

    Raises:
        ConfigError: there is no such sample. The message lists all samples.
    """
    for file in SAMPLES:
        if name in (file, file.rpartition(".")[0]):
            return (files(__name__) / file).read_text(encoding="utf-8")
    raise ConfigError(f"no sample {name!r}: there are {', '.join(SAMPLES)}")
