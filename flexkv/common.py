"""An import of this module raises ConfigError, whose message says what to use instead. SGLang's option --enable-flexkv
is for another package that is also named flexkv. The code of that option first imports the other package's
`flexkv.common`.
"""

from flexkv.integration.other_flexkv import SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD, refuse_other_flexkv

refuse_other_flexkv(__name__, SGLANG_INSTEAD, TENSORRT_LLM_INSTEAD)
