"""A program with a segment cache on disk: `python -m tests.unit.blend.segment_child FOLDER LIFE`.

LIFE is one of three actions. "close" stores three segments and closes the cache. "kill" stores them, waits until they
are durable, and kills the process. "answer" runs a prompt that consists of them, and prints the result as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from flexkv.blend import BlendPlan, precompute, prefill
from flexkv.config import DiskConfig
from tests.unit.blend.blend_world import make_cache, make_model, random_segments
from tests.unit.cache.disk_world import disk_tier

LENGTHS = [20, 33, 16, 9]


def disk(folder: str) -> DiskConfig:
    return DiskConfig(folders=folder, bytes_per_folder=8 << 20)


def main(folder: str, life: str) -> None:
    model = make_model()
    cache = make_cache(model, disk=disk(folder))
    segments = random_segments(LENGTHS)
    if life == "answer":
        before = [cache.cached_tokens(segment) for segment in segments]
        prompt = [segments[2], segments[0], segments[1], segments[3]]
        logits, _, report = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
        found = {
            "cached": before,
            "reused": report.reused,
            "lost": report.lost,
            "logits": logits[0].tolist(),
            "read": disk_tier(cache.manager).counts.read,
        }
        print(json.dumps(found))
    else:
        assert precompute(model, segments[:3], cache) == sum(LENGTHS[:3])
        if life == "kill":
            assert cache.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
