"""A reference implementation of the digest. It follows the text of docs/digest.md and uses plain integers. Tests
compare the native digest with it.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
LEAF_BYTES = 4096
WORDS = 512
LANES = 8


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def constant(i: int) -> int:
    return mix((0x243F6A8885A308D3 + (i + 1) * 0x9E3779B97F4A7C15) & MASK)


K = [constant(i) for i in range(WORDS)]
A = [constant(WORDS + j) for j in range(LANES)]
B = [constant(WORDS + LANES + j) for j in range(LANES)]
LENGTH, INDEX, RUN = (constant(WORDS + 2 * LANES + i) for i in range(3))


def leaf(data: bytes, index: int) -> int:
    products, words = [0] * LANES, [0] * LANES
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        x = word ^ K[i // 8]
        lane = i // 8 % LANES
        products[lane] = (products[lane] + (x & 0xFFFFFFFF) * (x >> 32)) & MASK
        words[lane] = (words[lane] + word) & MASK
    folded = 0
    for j in range(LANES):
        product = (products[j] ^ A[j]) * (words[j] ^ B[j])
        folded = (folded + ((product & MASK) ^ (product >> 64))) & MASK
    return mix((mix((folded + len(data) * LENGTH) & MASK) + (index + 1) * INDEX) & MASK)


def run_digest(data: bytes) -> int:
    terms = sum(leaf(data[at : at + LEAF_BYTES], n) for n, at in enumerate(range(0, len(data), LEAF_BYTES)))
    return mix((terms + len(data) * RUN) & MASK)
