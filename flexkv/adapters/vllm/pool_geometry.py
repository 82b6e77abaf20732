"""Reads the KV groups from the engine's KV cache configuration, and determines which pages of each group a hit needs.
Refuses configurations that flexkv cannot serve."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from flexkv.cache.keys import namespace_digest
from flexkv.errors import GeometryError
from flexkv.facts.keys import Rule
from flexkv.facts.ranks import KvGroup

SERVED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """One of the engine's KV groups.

    Attributes:
        block_tokens: number of tokens per block.
        hash_tokens: how many tokens one of the engine's block hashes covers; divides `block_tokens`.
        num_blocks: number of blocks in the engine's pool, which all groups share.
        layer_names: names of the group's layers, in the engine's order.
        kv_dtype: names of the dtypes of the pool's elements, joined by "+".
        number: the engine's number of the group.
        rule: which pages of the group a hit needs.
        reach: the reach of a window in pages, or of a chunk in tokens; 0 for other rules.
        states: the shapes of the recurrent states that a block holds, as text; empty for attention.
        states_handed_over: whether the engine reports in `boundary_state_offloads` which block holds which state. It
            has to do so if a state in a request's block table may end within a block.
    """

    block_tokens: int
    hash_tokens: int
    num_blocks: int
    layer_names: tuple[str, ...]
    kv_dtype: str = ""
    number: int = 0
    rule: Rule = Rule.FULL
    reach: int = 0
    states: str = ""
    states_handed_over: bool = False

    @property
    def hashes_per_block(self) -> int:
        return self.block_tokens // self.hash_tokens

    @property
    def signature(self) -> bytes:
        """32 bytes computed from everything that determines the content of the group's pages and which of them a hit
        needs. So pages of different layers have different keys, even for the same tokens.
        """
        facts = {
            "rule": self.rule.value,
            "reach": self.reach,
            "block_tokens": self.block_tokens,
            "layers": "\n".join(self.layer_names),
            "dtype": self.kv_dtype,
        }
        return namespace_digest(facts | ({"states": self.states} if self.states else {}))


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The engine's pool.

    Attributes:
        groups: the KV groups. Groups with full attention come first.
        alignment_tokens: every hit is a multiple of this many tokens.
    """

    groups: tuple[BlockGeometry, ...]
    alignment_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.groups[0].num_blocks

    @property
    def is_hybrid(self) -> bool:
        """Whether the engine has several groups, or a single group without full attention."""
        return len(self.groups) > 1 or self.groups[0].rule is not Rule.FULL

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return any(group.rule is Rule.STATE for group in self.groups)

    @property
    def has_hits_within_blocks(self) -> bool:
        """Whether a hit in the engine's own prefix cache may end within a block, which vLLM allows for models with
        recurrent states. vLLM then copies the block, and does not count the tokens in it when it looks a request up."""
        return self.has_states and any(group.hashes_per_block > 1 for group in self.groups)

    @property
    def states_handed_over(self) -> bool:
        """Whether the engine reports the boundaries of its steps, and which blocks hold the states there."""
        return any(group.states_handed_over for group in self.groups)

    def kv_groups(self) -> list[KvGroup]:
        """Returns the groups in the form that `build_unit` takes."""
        return [
            KvGroup(group.block_tokens, group.rule, group.reach, group.signature if self.is_hybrid else b"")
            for group in self.groups
        ]


def pool_geometry(config: KVCacheConfig) -> PoolGeometry:
    """Reads and checks the engine's KV cache configuration.

    Raises:
        GeometryError: the model has no KV, `check_group` refuses a group, a group has layers of several rules, or a
            block's number of tokens is not a multiple of the number that a block hash covers.
    """
    if not config.kv_cache_groups:
        raise GeometryError(
            "the model has no KV cache, so there is nothing to store; leave --kv-transfer-config out"
        )
    groups = [_group_geometry(config, number) for number in range(len(config.kv_cache_groups))]
    groups.sort(key=lambda group: group.rule is not Rule.FULL)
    whole = math.lcm(*(group.block_tokens for group in groups))
    aligned = config.cache_hit_alignment_tokens if len(groups) > 1 else None
    return PoolGeometry(tuple(groups), math.lcm(whole, aligned or whole))


def one_group_geometry(config: KVCacheConfig) -> PoolGeometry:
    """Returns the geometry of an engine that has a single group, with full attention.

    Raises:
        GeometryError: `pool_geometry` raises it, or the engine has other groups.
    """
    geometry = pool_geometry(config)
    if geometry.is_hybrid:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups)
        raise GeometryError(
            f"the model's KV cache groups are {kinds}; here only one of full attention is served. Start vLLM with "
            "--disable-hybrid-kv-cache-manager where the model allows it"
        )
    return geometry


def _group_geometry(config: KVCacheConfig, number: int) -> BlockGeometry:
    group = config.kv_cache_groups[number]
    check_group(group)
    specs = layer_specs(group)
    spec = specs[0]
    hash_tokens = config.hash_block_size or spec.block_size
    if spec.block_size % hash_tokens:
        raise GeometryError(
            f"a block of {spec.block_size} tokens is no multiple of the {hash_tokens} tokens that a block hash covers"
        )
    dtypes = sorted({str(dtype).removeprefix("torch.") for one in specs for dtype in _dtypes_of(one)})
    recurrent = [one for one in specs if isinstance(one, MambaSpec)]
    rules = {_rule_of(one) for one in specs}
    if len(rules) != 1:
        raise GeometryError(
            f"KV cache group {number} has layers of several rules ({', '.join(type(one).__name__ for one in specs)}); "
            "a group's blocks are needed by one rule"
        )
    rule, reach = rules.pop()
    return BlockGeometry(
        spec.block_size,
        hash_tokens,
        config.num_blocks,
        tuple(group.layer_names),
        "+".join(dtypes),
        number,
        rule,
        reach,
        "; ".join(str(one.shapes) for one in recurrent),
        # A state may end within a block in two cases. In one, a block hash covers fewer tokens than a block. In the
        # other, a kernel writes checkpoints during prefill: it writes them just before the last state, and that state
        # may end anywhere.
        any(hash_tokens < one.block_size or one.num_prefill_checkpoint_blocks for one in recurrent),
    )


def _dtypes_of(spec: KVCacheSpec) -> tuple[torch.dtype, ...]:
    return spec.dtypes if isinstance(spec, MambaSpec) else (spec.dtype,)


def _rule_of(spec: KVCacheSpec) -> tuple[Rule, int]:
    """Returns the group's rule, which says which pages a hit needs, and the rule's reach. vLLM allocates blocks for
    exactly these pages."""
    if isinstance(spec, SlidingWindowSpec):
        return Rule.WINDOW, -(-_window_tokens(spec) // spec.block_size)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Rule.CHUNK, spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        return Rule.STATE, 0
    return Rule.FULL, 0


def _window_tokens(spec: SlidingWindowSpec) -> int:
    """Returns how many cached tokens the next token attends to. The next token is itself part of the window, but is not
    cached yet."""
    return int(spec.sliding_window - 1 + spec.extra_retained_tokens)


def layer_specs(group: KVCacheGroupSpec) -> tuple[KVCacheSpec, ...]:
    """Returns the distinct specs of a group's layers.

    If the layers have several shapes, vLLM gives a worker all specs, in a `UniformTypeKVCacheSpecs`, but the scheduler
    only the first spec.
    """
    return tuple(dict.fromkeys(iter_layer_specs(group.kv_cache_spec)))


def check_group(group: KVCacheGroupSpec) -> None:
    """Refuses a KV cache group whose blocks depend on tokens after them, or hold neither one KV entry per token nor
    recurrent states.

    Also refuses subclasses of the specs in `SERVED_SPECS`, because they differ in meaning: with `RSWASpec` vLLM frees
    blocks of a running request, `HiddenStateCacheSpec` holds no KV, and `SinkFullAttentionSpec` has KV that belongs to
    no token of the prompt.

    Raises:
        GeometryError: the group is refused; the message names the spec's type or field.
    """
    where = f"KV cache group of {len(group.layer_names)} layers"
    for spec in iter_layer_specs(group.kv_cache_spec):
        _check_spec(spec, where)
    if group.host_resident or not group.enable_kv_transfer:
        raise GeometryError(
            f"{where} is not for connectors ({group.role.value}); flexkv stores KV on the device"
        )


def _check_spec(spec: KVCacheSpec, where: str) -> None:
    if type(spec) not in SERVED_SPECS:
        served = ", ".join(kind.__name__ for kind in SERVED_SPECS)
        raise GeometryError(f"{where} is a {type(spec).__name__}; flexkv stores {served}")
    if isinstance(spec, MambaSpec):
        _check_states(spec, where)
        return
    if isinstance(spec, SlidingWindowSpec) and not _window_tokens(spec):
        raise GeometryError(
            f"{where} has a sliding window of one token, of which vLLM keeps no block for a hit"
        )
    if getattr(spec, "non_causal", False):
        raise GeometryError(
            f"{where} is non-causal (a prefix LM): KV depends on later tokens of the prompt, so that of one prompt is "
            "of no use to another; leave --kv-transfer-config out"
        )
    if spec.tokens_per_state != 1:
        raise GeometryError(
            f"{where} has {spec.tokens_per_state} tokens a state; flexkv stores models with 1"
        )


def _check_states(spec: MambaSpec, where: str) -> None:
    """Refuses recurrent states that the engine does not keep at the ends of blocks."""
    if spec.mamba_cache_mode != "align":
        raise GeometryError(
            f"{where} holds recurrent states and mamba_cache_mode is {spec.mamba_cache_mode!r}, in which vLLM hands no "
            "state over; start it with --enable-prefix-caching --mamba-cache-mode align"
        )
