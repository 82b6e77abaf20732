"""The demo's second part: a model with sliding windows, which vLLM serves as six KV groups. One prompt is asked cold,
and again after the engine has dropped its cache. The answers are compared with the answer of an engine without flexkv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess, engine_arguments
from demo.model import PRESETS, WEIGHT_STD, prompt_tokens, write_tokenizer

LAYERS, WINDOW = 6, 128
"""Number of layers, and number of tokens in a sliding window. All layers except one attend only to the window."""
BLOCK_TOKENS = 32
PROMPT_TOKENS = 1400
ANSWER_TOKENS = 12
HOST_BYTES = 64 << 20
POOL_BLOCKS = 512
STORED = "vllm:flexkv_moved_pages_total{direction=store}"


@dataclass(frozen=True, slots=True)
class HybridRun:
    """The answers to one prompt, and the numbers of pages and tokens that flexkv stored and served.

    Attributes:
        cold, hit, alone: the tokens of the three answers. The engine with flexkv computed the prompt (`cold`) or got it
            from flexkv (`hit`); the engine without flexkv computed it (`alone`).
        cached: number of prompt tokens of the hit that were not computed.
        stored_pages: number of pages stored, over all KV groups. `whole_pages` is the number that would be stored if
            all layers had full attention.
    """

    cold: tuple[int, ...]
    hit: tuple[int, ...]
    alone: tuple[int, ...]
    cached: int
    stored_pages: int

    @property
    def whole_pages(self) -> int:
        return LAYERS * ((PROMPT_TOKENS + ANSWER_TOKENS - 1) // BLOCK_TOKENS)

    def problems(self) -> Iterator[str]:
        """Yields a text for each problem of the run; nothing if the run is correct."""
        if not self.cold == self.hit == self.alone:
            yield f"windows: answers differ: cold {self.cold}, hit {self.hit}, without flexkv {self.alone}"
        if self.cached != (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
            yield f"windows: {self.cached} of {PROMPT_TOKENS} prompt tokens were served"
        if not 0 < self.stored_pages < self.whole_pages:
            yield f"windows: {self.stored_pages} pages were stored of {self.whole_pages}"

    def __str__(self) -> str:
        share = self.stored_pages / self.whole_pages
        return (
            f"sliding windows (Gemma 3, {LAYERS} KV groups): a hit of {self.cached} of {PROMPT_TOKENS} tokens equals "
            f"cold; {self.stored_pages} pages stored, {share:.0%} of the {self.whole_pages} that full attention in all "
            "layers would have"
        )


def play(folder: Path, log: Path, now: Callable[[str], None]) -> HybridRun:
    """Runs the second part of the demo, and returns its results.

    Args:
        folder: where the model is written.
        now: a function that is called with a description of each step when the step begins.
    """
    now("writing a random Gemma 3")
    model = write_gemma_3(folder / "gemma3")
    request = {"ids": list(prompt_tokens(PROMPT_TOKENS, 3)), "max_tokens": ANSWER_TOKENS}
    flexkv = FLEXKV | {"kv_connector_extra_config": {"host.bytes": HOST_BYTES}}
    environment = IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    now("windows: starting vLLM alone")
    with EngineProcess(
        engine_arguments(model, None, BLOCK_TOKENS, POOL_BLOCKS), log, environment=environment
    ) as engine:
        [alone] = engine.generate([request])
    now("windows: starting vLLM with flexkv")
    with EngineProcess(
        engine_arguments(model, flexkv, BLOCK_TOKENS, POOL_BLOCKS), log, environment=environment
    ) as engine:
        [cold] = engine.generate([request])
        engine.call("drain")
        stored = engine.metrics("flexkv_moved_pages")[STORED]
        engine.call("reset")
        [hit] = engine.generate([request])
    return HybridRun(
        cold=tuple(cold["tokens"]),
        hit=tuple(hit["tokens"]),
        alone=tuple(alone["tokens"]),
        cached=hit["cached"] or 0,
        stored_pages=int(stored),
    )


def write_gemma_3(folder: Path) -> Path:
    """Writes a Gemma 3 model that has five layers with sliding windows and one layer with full attention. Its float32
    weights are random, but the same in every run. Returns the model's folder.
    """
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = PRESETS["tiny"]
    config = Gemma3TextConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        query_pre_attn_scalar=shape.head_size,
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        sliding_window=WINDOW,
        max_position_embeddings=shape.context_tokens,
        # With tied embeddings the model would repeat its last token, whatever the cache holds.
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model = Gemma3ForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * WEIGHT_STD)
    model.save_pretrained(folder)
    write_tokenizer(folder, shape)
    return folder
