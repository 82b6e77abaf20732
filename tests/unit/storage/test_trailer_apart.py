"""Trailers that are stored in a separate buffer, not behind the page's stripes, as in the values of a shared store."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.c_ext import PageCodec, run_digest
from flexkv.errors import GeometryError
from flexkv.storage.tags import make_tags

RUNS = ((1000, 3000, 700), (900, 2500, 100))
KEY = np.arange(16, dtype=np.uint8).reshape(1, 16)
TAG = make_tags(KEY, 0, np.zeros(1, np.uint64), 4).tobytes()
PLACE = (77, 0)


def codec(host_digests: bool) -> PageCodec:
    tables = []
    for sizes in RUNS:
        offsets = np.cumsum((0, *sizes[:-1]))
        tables.append(np.array([offsets, sizes, range(len(sizes))], np.int64).T.copy())
    return PageCodec([sum(sizes) for sizes in RUNS], tables, host_digests, 3)


def image_of(of: PageCodec, host_digests: bool) -> np.ndarray:
    image = np.random.default_rng(0).integers(0, 256, of.image_bytes, np.uint8)
    for rank, sizes in enumerate(RUNS) if host_digests else ():
        stripe = image[of.stripe_offset(rank) : of.stripe_offset(rank) + sum(sizes)]
        runs = np.split(stripe, np.cumsum(sizes)[:-1])
        digests = np.array([run_digest(run) for run in runs], np.uint64).view(np.uint8)
        image[of.digest_offset(rank) : of.digest_offset(rank) + len(digests)] = digests
    return image


@pytest.mark.parametrize("host_digests", [False, True])
def test_it_is_the_trailer_that_an_image_has(host_digests: bool) -> None:
    of = codec(host_digests)
    image, apart = image_of(of, host_digests), np.zeros(of.trailer_bytes, np.uint8)
    of.seal_apart(image, apart, *PLACE, TAG, 1)
    whole = image.copy()
    of.seal(whole, *PLACE, TAG, 1)
    assert bytes(apart) == bytes(whole[of.trailer_offset : of.trailer_offset + of.trailer_bytes])
    assert of.check_apart(image, apart, *PLACE, TAG, 2) == ("none", "")


def test_digests_come_with_a_page_that_is_to_have_them_and_with_no_other() -> None:
    of = codec(True)
    image, apart = image_of(of, True), np.zeros(of.trailer_bytes, np.uint8)
    of.seal_apart(image, apart, *PLACE, TAG, 1)
    came = image.copy()
    came[of.trailer_offset :] = 0
    assert of.check_apart(came, apart, *PLACE, TAG, 2)[0] == "none"
    at = of.digest_offset(0)
    assert bytes(came[at : at + 24]) == bytes(image[at : at + 24])
    damaged = came.copy()
    damaged[of.trailer_offset :] = 0
    damaged[5] ^= 1
    assert of.check_apart(damaged, apart, *PLACE, TAG, 2)[0] == "data"
    assert not damaged[of.trailer_offset :].any()


def test_stripes_without_room_for_a_trailer_suffice_where_they_have_no_digests() -> None:
    of = codec(False)
    image, apart = image_of(of, False)[: of.trailer_offset], np.zeros(of.trailer_bytes, np.uint8)
    of.seal_apart(image, apart, *PLACE, TAG, 1)
    assert of.check_apart(image, apart, *PLACE, TAG, 2)[0] == "none"
    with pytest.raises(GeometryError, match="a page's stripes take"):
        of.seal_apart(image[:-1], apart, *PLACE, TAG, 1)
    with pytest.raises(GeometryError, match="a page's stripes take"):
        codec(True).check_apart(image, apart, *PLACE, TAG, 1)
    with pytest.raises(GeometryError, match="a trailer has"):
        of.check_apart(image, apart[:-1], *PLACE, TAG, 1)


@pytest.mark.parametrize("at", [0, 5, 4700, 8192, 8192 + 3499])
def test_every_stripe_is_covered(at: int) -> None:
    of = codec(False)
    image, apart = image_of(of, False), np.zeros(of.trailer_bytes, np.uint8)
    of.seal_apart(image, apart, *PLACE, TAG, 1)
    image[at] ^= 1
    expected = "none" if at == 4700 else "data"  # byte 4700 is padding behind the end of the first stripe
    assert of.check_apart(image, apart, *PLACE, TAG, 2)[0] == expected
