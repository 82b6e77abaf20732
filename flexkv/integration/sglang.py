"""Raises when imported: later versions of SGLang look here for the connector of the other package named flexkv."""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD)
