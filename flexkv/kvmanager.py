"""A module of the other package named flexkv, with its cache manager: importing it is an error."""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD)
