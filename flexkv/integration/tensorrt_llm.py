"""Raises when imported: the other package named flexkv has such a module, which its TensorRT-LLM examples use."""

from flexkv.integration.other_flexkv import TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, TENSORRT_LLM_INSTEAD)
