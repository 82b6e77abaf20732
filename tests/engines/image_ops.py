"""Operations that send prompts with images to an engine."""

from __future__ import annotations

from typing import Any

from demo.engine_child import Operation
from tests.engines.transformers_models import IMAGE_EDGE, IMAGE_TOKEN


def ask_image(
    llm: Any, seed: int, before: int, after: int, max_tokens: int = 8, name: str = ""
) -> dict[str, Any]:
    """Sends one prompt that consists of words, an image of random pixels, and more words.

    Args:
        seed: seed of the image's pixels.
        before, after: number of words before and after the image.
        name: the caller's name for the image; if empty, vLLM chooses one.
    """
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_EDGE, IMAGE_EDGE, 3), dtype=np.uint8)
    words = [f"w{10 + word}" for word in range(before + after)]
    prompt: dict[str, Any] = {
        "prompt": " ".join([*words[:before], IMAGE_TOKEN, *words[before:]]),
        "multi_modal_data": {"image": Image.fromarray(pixels)},
    }
    if name:
        prompt["multi_modal_uuids"] = {"image": name}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens or 0,
        "prompt": len(output.prompt_token_ids),
    }


OPERATIONS: dict[str, Operation] = {"ask_image": ask_image}
