"""Measures for each blending ratio how much the answers differ from those of a full recompute, and how long blending
takes.

Quality is measured on a byte-level language model with Llama's architecture. This program first trains it on the source
code of Python's standard library, because no small package contains trained weights. A prompt consists of four segments
of held-out text, each cached separately, and of the 16 bytes that follow them in the text. Time is measured on a larger
model with random weights, because the time does not depend on the weights' values. Quality and time are compared with
those of a full recompute, and with those of a prefix cache that reuses the first segment. `--json PATH` writes the
figures to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import at_least_one
from flexkv.blend import BlendPlan, precompute, prefill, segment_cache
from flexkv.blend.cache import SegmentCache
from flexkv.config import DiskConfig

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
DISK_RATIOS = (0.0, 0.15)
SEGMENTS = 4
CONTEXT = 288
HELD_OUT = ("argparse.py", "logging/__init__.py", "statistics.py")

Text = NDArray[np.int64]


def make_model(layers: int, hidden: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)


def corpus() -> tuple[Text, Text]:
    """Returns the bytes to train on, and the held-out bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    held_out = [library / name for name in HELD_OUT]
    others = [path for path in sorted(library.glob("*.py")) if path not in held_out]

    def read(paths: list[Path]) -> Text:
        return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8).astype(np.int64)

    return read(others), read(held_out)


def train(model: Any, text: Text, seconds: float) -> tuple[int, float]:
    """Trains the model. Returns the number of steps, and the mean loss of the last 20 steps in nats per byte."""
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start, losses = time.monotonic(), [0.0]
    while (passed := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, len(losses) / 20) * (1.0 - 0.95 * passed / seconds)
        at = random.integers(0, len(text) - CONTEXT, 8)
        batch = torch.from_numpy(np.stack([text[a : a + CONTEXT] for a in at]))
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return len(losses) - 1, statistics.mean(losses[1:][-20:] or [0.0])


def held_out_loss(model: Any, text: Text) -> float:
    batch = torch.from_numpy(text[: 16 * CONTEXT].reshape(16, CONTEXT))
    return float(model(batch, labels=batch).loss)


def quality(model: Any, text: Text, prompts: int) -> list[dict[str, Any]]:
    """Compares the answers of each method with the answers of a full recompute of the same prompts."""
    random = np.random.default_rng(1)
    length, question = 64, 16
    cache = segment_cache(model, {"weights": "trained"}, slots=2048, staging_tokens=1024)
    found: dict[str, list[tuple[bool, float, float]]] = {}
    layers = len(model.model.layers)
    for _ in range(prompts):
        at = int(random.integers(0, len(text) - CONTEXT))
        tokens = text[at : at + SEGMENTS * length + question]
        segments = [tokens[n * length : (n + 1) * length] for n in range(SEGMENTS)]
        precompute(model, segments, cache)
        prompt = [*segments, tokens[SEGMENTS * length :]]
        full = model(torch.from_numpy(tokens)[None]).logits[0, -1].log_softmax(-1)

        def note(name: str, logits: Any, rows: float, full: Any = full) -> None:
            mine = logits.log_softmax(-1)
            divergence = float((full.exp() * (full - mine)).sum())
            found.setdefault(name, []).append((bool(full.argmax() == mine.argmax()), divergence, rows))

        past = model(torch.from_numpy(segments[0])[None], use_cache=True).past_key_values
        rest = torch.from_numpy(tokens[length:])[None]
        again = model(rest, past_key_values=past, use_cache=True).logits[0, -1]
        note("prefix only", again, 1.0 - length / len(tokens))
        for ratio in RATIOS:
            answer = prefill(model, prompt, cache, BlendPlan.of_ratio(ratio))
            computed = sum(len(rows) for rows in answer.report.computed)
            note(f"ratio {ratio}", answer.logits[0], computed / (len(tokens) * layers))
    cache.close()
    return [
        {
            "reuse": name,
            "agreement": statistics.mean(agreed for agreed, _, _ in answers),
            "kl_nats": statistics.mean(kl for _, kl, _ in answers),
            "rows_computed": statistics.mean(rows for _, _, rows in answers),
        }
        for name, answers in found.items()
    ]


class Prompts:
    """A prompt whose segments are in two caches: one in host memory, and one on disk."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(8, 512, 1024).eval()
        random = np.random.default_rng(2)
        segments = [random.integers(0, 1024, 256) for _ in range(SEGMENTS)]
        self.prompt = [*segments[::-1], random.integers(0, 1024, 32)]
        self.cache = segment_cache(self.model, {"weights": "random"}, slots=128, staging_tokens=2048)
        self._disk = DiskConfig(folders=str(folder), bytes_per_folder=1 << 30)
        self.on_disk = self._open()
        for cache in (self.cache, self.on_disk):
            precompute(self.model, segments, cache)
        first = torch.from_numpy(self.prompt[0])[None]
        self._prefix = self.model(first, use_cache=True).past_key_values

    def _open(self) -> SegmentCache:
        return segment_cache(
            self.model, {"weights": "random"}, slots=128, staging_tokens=2048, disk=self._disk
        )

    def restart(self) -> None:
        """Closes and reopens the cache on disk, so that its pages are only on disk."""
        self.on_disk.close()
        self.on_disk = self._open()

    def full(self) -> None:
        tokens = torch.from_numpy(np.concatenate(self.prompt))[None]
        self.model(tokens, use_cache=True, logits_to_keep=1)

    def prefix_only(self) -> None:
        past = DynamicCache()
        for number, layer in enumerate(self._prefix.layers):
            past.update(layer.keys, layer.values, number)
        rest = torch.from_numpy(np.concatenate(self.prompt[1:]))[None]
        self.model(rest, past_key_values=past, use_cache=True, logits_to_keep=1)

    def blended(self, ratio: float, on_disk: bool = False) -> None:
        cache = self.on_disk if on_disk else self.cache
        report = prefill(self.model, self.prompt, cache, BlendPlan.of_ratio(ratio)).report
        assert report.reused == SEGMENTS * 256

    def close(self) -> None:
        self.cache.close()
        self.on_disk.close()


def times(rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Times each method in interleaved rounds. Returns the medians of the seconds, and of the ratio to a full
    recompute.
    """
    prompts = Prompts(folder)
    calls: dict[str, Callable[[], None]] = {"full": prompts.full, "prefix only": prompts.prefix_only}
    calls |= {f"ratio {ratio}": partial(prompts.blended, ratio) for ratio in RATIOS}
    calls |= {f"ratio {ratio}, disk": partial(prompts.blended, ratio, on_disk=True) for ratio in DISK_RATIOS}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            if "disk" in name:
                prompts.restart()
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    prompts.close()
    return {
        name: {
            "seconds": statistics.median(seconds[1:]),
            "to_full": statistics.median(s / f for s, f in zip(seconds[1:], taken["full"][1:], strict=True)),
        }
        for name, seconds in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-s", type=float, default=120.0, help="seconds; 0 leaves the weights random")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument(
        "--disk", type=Path, help="folder of a disk for cached segments; default: the system's"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = make_model(4, 96, 256)
    train_text, text = corpus()
    steps, loss = train(model, train_text, arguments.train_s)
    model.eval()
    torch.set_grad_enabled(False)
    held_out = held_out_loss(model, text)
    print(f"trained {steps} steps: {loss:.2f} nats a byte, {held_out:.2f} on held-out text")
    answers = quality(model, text, arguments.prompts)
    for row in answers:
        figures = [f"{key} {value:.4g}" for key, value in row.items() if key != "reuse"]
        print(f"{row['reuse']:14} " + "  ".join(figures))
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        taken = times(arguments.rounds, Path(folder))
    for name, values in taken.items():
        print(f"{name:18} {values['seconds']:.3f} s, {values['to_full']:.2f} x full")
    if arguments.json:
        report = {
            "steps": steps,
            "train_nats": loss,
            "held_out_nats": held_out,
            "prompts": arguments.prompts,
            "rounds": arguments.rounds,
            "load": os.getloadavg(),
            "quality": answers,
            "times": taken,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
