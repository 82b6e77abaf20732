"""The encoding of a page. Two pools with equal format ids hold the same bytes for the same block."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum

from flexkv.c_ext import KvView
from flexkv.errors import GeometryError

GEOMETRY_DIGEST_BYTES = 8


class Interior(Enum):
    """The meaning of the bytes of one layer of a block. H heads, N tokens, D head size."""

    KV_SPLIT_NHD = "kv-nhd"
    """K then V, each [N, H, D] (SGLang)."""
    KV_SPLIT_HND = "kv-hnd"
    """K then V, each [H, N, D] (TensorRT-LLM)."""
    KV_JOINED_HND = "hnd"
    """[H, N, K then V of one token and head] (vLLM, *HNC orders)."""
    KV_JOINED_NHD = "nhd"
    """[N, H, K then V of one token and head] (vLLM, *NHC orders)."""
    K_TRANSPOSED = "kt-v"
    """Per head K as [D, N], then V as [N, D] (vLLM's vector attention on a CPU)."""
    LATENT = "latent"
    """[N, latent] without heads (MLA)."""
    OPAQUE = "opaque"
    """Known only to the engine that wrote it, which `FormatId.owner` names."""


class PageOrder(Enum):
    """How the layers of a block follow each other in a stripe."""

    LAYER_MAJOR = "layer-major"
    """Each layer's bytes are contiguous, layers ascending: a range of layers can be read separately."""
    NATIVE_BLOCK = "native-block"
    """The order of the engine's pool: one run, in which layers may be interleaved."""


_TEXT = re.compile(
    rf"(?P<interior>{'|'.join(interior.value for interior in Interior)})(?:~(?P<owner>.+?))?(?P<tokens>\d{{1,9}})"
    rf"\.(?P<order>{'|'.join(order.value for order in PageOrder)})\.r(?P<ranks>\d{{1,9}})\.(?P<geometry>[0-9a-f]+)"
)


@dataclass(frozen=True, slots=True)
class FormatId:
    """A property of a pool or slab, never part of a key. Hashable; `str()` can be used in a folder's name.

    Attributes:
        interior_tokens: tokens of one interior unit: the block's, or the kernel block's if a block is split.
        ranks: stripes of a page.
        geometry: hex digest of every run's layer, page offset and size, in page order.
        owner: who can read an OPAQUE interior; empty for the others.
    """

    interior: Interior
    interior_tokens: int
    page_order: PageOrder
    ranks: int
    geometry: str
    owner: str = ""

    def __post_init__(self) -> None:
        if (self.interior is Interior.OPAQUE) != bool(self.owner):
            raise GeometryError(f"owner {self.owner!r}: only an opaque interior has one, and it must name it")
        if self.ranks < 1:
            raise GeometryError(f"ranks is {self.ranks}: must be at least 1")

    @classmethod
    def of_view(
        cls, view: KvView, interior: Interior, interior_tokens: int, ranks: int, owner: str = ""
    ) -> FormatId:
        """The format of pages made through `view`, which determines the page order."""
        runs = view.runs
        layers = runs[:, 4]
        order = PageOrder.LAYER_MAJOR if bool((layers[1:] >= layers[:-1]).all()) else PageOrder.NATIVE_BLOCK
        # Joins runs per layer, so that a layer that is whole in one pool and split in another has the same
        # format.
        framed = [f"{view.stripe_bytes}"]
        previous = -1
        for _, _, _, offset, layer in runs.tolist():
            if layer != previous:
                framed.append(f"{layer}@{offset}")
                previous = layer
        digest = hashlib.blake2b(";".join(framed).encode(), digest_size=GEOMETRY_DIGEST_BYTES).hexdigest()
        return cls(interior, interior_tokens, order, ranks, digest, owner)

    @classmethod
    def parse(cls, text: str) -> FormatId:
        """The format that `str()` wrote.

        Raises:
            GeometryError: `text` is not a format.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise GeometryError(f"{text!r} is no format of pages")
        return cls(
            Interior(found["interior"]),
            int(found["tokens"]),
            PageOrder(found["order"]),
            int(found["ranks"]),
            found["geometry"],
            found["owner"] or "",
        )

    def __str__(self) -> str:
        interior = f"{self.interior.value}{f'~{self.owner}' if self.owner else ''}{self.interior_tokens}"
        return f"{interior}.{self.page_order.value}.r{self.ranks}.{self.geometry}"
