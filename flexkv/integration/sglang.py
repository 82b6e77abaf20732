"""A module of the other package named flexkv, where later SGLangs look for a connector: importing it is an error."""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD)
