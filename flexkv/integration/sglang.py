"""Raises ConfigError when imported. Later versions of SGLang import the connector of the other package named flexkv
under this name."""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD)
