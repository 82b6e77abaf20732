"""Raises ConfigError when imported. The TensorRT-LLM examples of the other package named flexkv import a module of this
name."""

from flexkv.integration.other_flexkv import TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, TENSORRT_LLM_INSTEAD)
