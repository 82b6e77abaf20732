"""A module of the other package named flexkv, where its TensorRT-LLM examples look: importing it is an error."""

from flexkv.integration.other_flexkv import TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, TENSORRT_LLM_INSTEAD)
