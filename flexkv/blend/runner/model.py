"""Runs the steps of a transformers model's layers one by one, on chosen rows of a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexkv.blend.base import KvShape
from flexkv.blend.registry import NotBlendable, family_of, head_dim_of, rope_of


class LayeredModel:
    """A causal language model, divided into the steps that blending calls.

    Raises:
        NotBlendable: the model's family is not supported, its weights are not all in host memory, or they have several
            dtypes.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config()
        self.family = family_of(self.config)
        self.rope = rope_of(self.config)
        self.model = model
        self.inner = model.model
        self.layers = list(self.inner.layers)
        devices = {str(parameter.device) for parameter in model.parameters()}
        if devices != {"cpu"}:
            raise NotBlendable(
                f"the model's weights lie on {sorted(devices)}: the runner works in host memory"
            )
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if len(dtypes) != 1:
            raise NotBlendable(
                f"the model's weights have the dtypes {sorted(map(str, dtypes))}: one is needed"
            )
        self.dtype = dtypes.pop()
        self.head_dim = head_dim_of(self.config)
        self._rotate = sys.modules[type(self.layers[0].self_attn).__module__].apply_rotary_pos_emb

    @property
    def shape(self) -> KvShape:
        dtype = str(self.dtype).rpartition(".")[2]
        return KvShape(len(self.layers), self.config.num_key_value_heads, self.head_dim, dtype)

    @property
    def frequencies(self) -> Any:
        """The model's own radians per position, float64 [rotary_dim / 2], for prompts of up to `max_positions`
        tokens."""
        rotary = self.inner.rotary_emb
        own = rotary.original_inv_freq if self.rope.scaling == "dynamic" else rotary.inv_freq
        return own.double().numpy()

    @contextmanager
    def own_frequencies(self) -> Iterator[None]:
        """A context manager, within which the model itself uses `frequencies`. Its former frequencies are restored
        afterwards.

        This matters only for a "dynamic" rope. After a prompt of more than `max_positions` tokens, such a rope keeps
        its changed frequencies until a prompt of fewer than `max_positions` tokens comes. So it would use the changed
        ones for a prompt of exactly `max_positions` tokens.
        """
        rotary = self.inner.rotary_emb
        if self.rope.scaling != "dynamic":
            yield
            return
        found = rotary.inv_freq, rotary.max_seq_len_cached
        rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
        try:
            yield
        finally:
            rotary.inv_freq, rotary.max_seq_len_cached = found

    def check_length(self, length: int) -> None:
        """Checks that a prompt of `length` tokens can be blended.

        Raises:
            NotBlendable: the prompt is so long that a "dynamic" rope changes its frequencies.
        """
        if self.rope.scaling == "dynamic" and length > self.rope.max_positions:
            raise NotBlendable(
                f"{length} tokens with a dynamic rope: its frequencies change beyond {self.rope.max_positions}, "
                "and with them every cached key"
            )

    def embed(self, tokens: Any) -> Any:
        """Returns the embeddings of tokens: [tokens] -> [tokens, hidden]."""
        return self.inner.embed_tokens(tokens)

    def rotated(self, rows: Any, positions: Any) -> Any:
        """Rotates keys or queries with the model's own rotary embedding.

        Args:
            rows: the keys or queries, [rows, heads, head_dim].
            positions: position of each row, int64 [rows].
        """
        with self.own_frequencies():
            cosine, sine = self.inner.rotary_emb(rows[None], positions[None])
        batched = rows.transpose(0, 1)[None]
        turning = batched[..., : cosine.shape[-1]]
        turned, _ = self._rotate(turning, turning, cosine, sine)
        return torch.cat((turned, batched[..., cosine.shape[-1] :]), dim=-1)[0].transpose(0, 1)

    def project(self, layer: int, hidden: Any, positions: Any) -> tuple[Any, Any, Any]:
        """Returns query, key and value, each [rows, heads, head_dim], of the layer's input `hidden` [rows, hidden].
        Query and key are rotated to `positions` [rows].
        """
        attention = self.layers[layer].self_attn
        normed = self.layers[layer].input_layernorm(hidden)
        query, key, value = (
            linear(normed).view(len(hidden), -1, self.head_dim)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.family.normed_heads:
            query, key = attention.q_norm(query), attention.k_norm(key)
        return self.rotated(query, positions), self.rotated(key, positions), value

    def finish(self, layer: int, hidden: Any, attended: Any) -> Any:
        """Returns the layer's output, given its input `hidden` [rows, hidden] and the result of its attention,
        `attended` [rows, heads * head_dim].
        """
        module = self.layers[layer]
        hidden = hidden + module.self_attn.o_proj(attended)
        return hidden + module.mlp(module.post_attention_layernorm(hidden))

    def scale(self, layer: int) -> float:
        return float(self.layers[layer].self_attn.scaling)

    def logits(self, hidden: Any) -> Any:
        """Returns the logits of rows: [rows, hidden] -> [rows, vocabulary]."""
        return self.model.lm_head(self.inner.norm(hidden))
