"""An import of this module raises ConfigError, which says what to use instead. SGLang's option --enable-flexkv is made
for another package that is also named flexkv, and begins with an import of that package's `flexkv.common`.
"""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD)
