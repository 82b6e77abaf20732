"""Decides whether vLLM's names of images and other inputs identify their content, or are valid only in this run.

vLLM makes the name of an input part of the hashes of all blocks that contain a part of the input. The name is one of:

- a digest of the content, which is valid in every run;
- a number, which vLLM's front end counts up if nothing in vLLM needs a digest. The next run counts from 1 again;
- the client's own name for the input (`multi_modal_uuids`, `uuid` over HTTP). vLLM only requires that names are unique
  among the inputs that it has cached, so in the next run clients may give the same name to another image. If the
  request also has options, vLLM hashes name and options; `name_marks` makes such a hash begin with `client-`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.name_marks import HASHER, marks_names
from flexkv.observe import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = get_logger(__name__)

RUN_NAME_BYTES = 16
"""Number of random bytes that identify a run."""

DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""Matches a name that is a digest made with `mm_hasher_algorithm`: digests of blake3 and sha256 have 32 bytes, those of
sha512 have 64."""

COUNTED = (
    "--no-enable-prefix-caching with --mm-processor-cache-gb 0: vLLM then numbers images and other inputs instead of "
    "hashing them, and the next run begins at 1 again. What is stored of a prompt from its first such input on serves "
    "this run alone. Leave out one of the two flags to have it served after a restart and to other engines"
)

SCALES_OF_THE_RUN = (
    "mm_encoder_attn_dtype=%s without mm_encoder_fp8_scale_path: the scales of the encoder's attention come from the "
    "images of this run, so what is stored of a prompt from its first image on serves this run alone. Set "
    "mm_encoder_fp8_scale_path to have it served after a restart and to other engines"
)

UNMARKED = (
    "flexkv's vLLM plugin does not mark hashes of clients' names in this process, so nothing tells them from digests "
    "of the content: what is stored of a prompt from its first image or other input on serves this run alone. Install "
    "flexkv as a package where each of vLLM's processes runs, and name it in VLLM_PLUGINS where that is set"
)

CLIENTS_NAMES = (
    "a client names an input itself (%r): another run's clients may give the same name to another input, so what is "
    "stored of a prompt from such an input on serves this run alone. Inputs without a client's name, and those whose "
    "name is a digest (64 or 128 hexadecimal digits) without options of the request, are served after a restart too"
)


@dataclass(slots=True)
class InputNames:
    """Decides which names of an engine's inputs are valid only in this run.

    Attributes:
        of_run: whether all names are valid only in this run. If False, names that are digests are valid in every run.
        run: random bytes that identify this run.
    """

    of_run: bool = False
    run: bytes = field(default_factory=lambda: os.urandom(RUN_NAME_BYTES))
    _has_warned: bool = False

    @classmethod
    def of(cls, config: VllmConfig) -> InputNames:
        """Reads from vLLM's configuration whether names are valid beyond this run. Warns if none is."""
        inputs = getattr(config.model_config, "multimodal_config", None)
        # The condition is the same as in vLLM's `BaseRenderer._process_mm_uuids`.
        counted = (
            inputs is not None
            and inputs.mm_processor_cache_gb == 0
            and not config.cache_config.enable_prefix_caching
        )
        if counted:
            logger.warning(COUNTED)
        encoder_dtype = getattr(inputs, "mm_encoder_attn_dtype", None)
        scales = getattr(inputs, "mm_encoder_fp8_scale_path", None)
        has_own_scales = encoder_dtype is not None and not scales
        if has_own_scales:
            logger.warning(SCALES_OF_THE_RUN, encoder_dtype)
        # The front end may make hashes in another process. It is assumed that vLLM has loaded the plugin in all of its
        # processes if it has loaded it in this one.
        is_unmarked = inputs is not None and not _are_names_marked()
        if is_unmarked:
            logger.warning(UNMARKED)
        return cls(counted or has_own_scales or is_unmarked)

    def first_of_run(self, request: Request) -> int | None:
        """Returns the position of the first token of an input whose name is valid only in this run; None if there is no
        such input."""
        first: int | None = None
        for feature in request.mm_features:
            # `mm_hash` comes first, because `identifier` may have an adapter's name before the input's.
            name = str(feature.mm_hash or feature.identifier)
            if self.of_run or not DIGEST.fullmatch(name):
                self._warn(name)
                offset = int(feature.mm_position.offset)
                first = offset if first is None else min(first, offset)
        return first

    def _warn(self, name: str) -> None:
        """Warns once that clients name inputs, unless `of` has already warned about all names."""
        if not self.of_run and not self._has_warned:
            self._has_warned = True
            logger.warning(CLIENTS_NAMES, name)


def _are_names_marked() -> bool:
    """Whether hashes of clients' names have a prefix in this process."""
    try:
        return marks_names(import_module(HASHER))
    except ModuleNotFoundError:  # this version of vLLM makes hashes elsewhere
        return False
