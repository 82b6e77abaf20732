"""Raises ConfigError when imported. SGLang's --enable-flexkv is made for the other package named flexkv, and first
imports that package's module of this name.
"""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD)
