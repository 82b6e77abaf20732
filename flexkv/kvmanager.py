"""Raises ConfigError with an explanation when imported, because another package that is named flexkv has its cache
manager in a module with this name.
"""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD)
