"""The encoding of a page. Two pools with equal format ids and equal dtypes hold the same bytes for the same block."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum

from flexkv.c_ext import KvView
from flexkv.errors import GeometryError

GEOMETRY_DIGEST_BYTES = 8


class Interior(Enum):
    """The meaning of the bytes of one layer of a block. H is the number of heads, N the number of tokens, and D the
    head size.
    """

    KV_SPLIT_NHD = "kv-nhd"
    """K then V, each [N, H, D] (SGLang)."""
    KV_SPLIT_HND = "kv-hnd"
    """K then V, each [H, N, D] (TensorRT-LLM)."""
    KV_JOINED_HND = "hnd"
    """[H, N, K then V of one token and head] (vLLM, *HNC orders)."""
    KV_JOINED_NHD = "nhd"
    """[N, H, K then V of one token and head] (vLLM, *NHC orders)."""
    K_TRANSPOSED = "kt-v"
    """For each head K as [D, N], then V as [N, D] (vLLM's vector attention on a CPU)."""
    LATENT = "latent"
    """[N, latent]: one latent per token, without heads (MLA)."""
    OPAQUE = "opaque"
    """An order that only the engine in `FormatId.owner` can interpret."""


class PageOrder(Enum):
    """The order of a block's layers in a stripe."""

    LAYER_MAJOR = "layer-major"
    """Layers in ascending order; each layer's bytes are contiguous. So a range of layers can be read separately."""
    NATIVE_BLOCK = "native-block"
    """The order of the bytes in the engine's pool, in which layers are interleaved or not ascending."""


_TEXT = re.compile(
    rf"(?P<interior>{'|'.join(interior.value for interior in Interior)})(?:~(?P<owner>.+?))?(?P<tokens>\d{{1,9}})"
    rf"\.(?P<order>{'|'.join(order.value for order in PageOrder)})\.r(?P<ranks>\d{{1,9}})\.(?P<geometry>[0-9a-f]+)"
)


@dataclass(frozen=True, slots=True)
class FormatId:
    """The format of the pages of a pool or slab. It is never part of a key. Hashable; `str()` can be used as part of a
    folder's name.

    Attributes:
        interior: the meaning of the bytes of one layer of a block.
        interior_tokens: tokens of one unit of the interior: a block or, if the engine splits blocks into kernel blocks,
            a kernel block.
        page_order: the order of the layers in a stripe.
        ranks: number of stripes of a page.
        geometry: hexadecimal digest of the stripe's size and of each layer's offsets in it. Adjacent runs of one layer
            count as one.
        owner: name of the engine or kernel that can interpret an OPAQUE interior; empty for all other interiors.

    Raises:
        GeometryError: an OPAQUE interior has no owner, a different interior has one, or `ranks` is less than 1.
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
        """Returns the format of the pages that are made through `view`. The view determines the page order and the
        geometry.
        """
        runs = view.runs
        layers = runs[:, 4]
        order = PageOrder.LAYER_MAJOR if bool((layers[1:] >= layers[:-1]).all()) else PageOrder.NATIVE_BLOCK
        # Adjacent runs of a layer are joined, so that the format does not depend on whether a layer is one run in the
        # pool or several.
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
        """The inverse of `str()`.

        Raises:
            GeometryError: `text` is not the text of a format.
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
