"""Functions that SGLang imports on a CPU but does not call, because on a CPU it uses its own torch layers."""

from typing import NoReturn


def _absent(name: str) -> NoReturn:
    raise NotImplementedError(f"vllm._custom_ops.{name}: not on a CPU; SGLang was to use its torch layers")


def rotary_embedding(*_arguments: object) -> NoReturn:
    """Never called, because SGLang computes rotary embeddings on a CPU in plain torch."""
    _absent("rotary_embedding")


def rms_norm(*_arguments: object) -> NoReturn:
    """Never called, because SGLang computes RMS norms on a CPU in plain torch."""
    _absent("rms_norm")


def fused_add_rms_norm(*_arguments: object) -> NoReturn:
    """Never called, because SGLang computes RMS norms on a CPU in plain torch."""
    _absent("fused_add_rms_norm")
