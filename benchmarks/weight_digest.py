"""Measures the rate of the digest of all content of a model's weight files, and compares it with the rate of a bare
parallel read of the same files.

The digest and the bare read take turns at reading files of random bytes, and bypass the page cache. The bare read uses
as many threads as the digest, and blocks of the same size, so it shows the rate that the disk allows. "background" is
the digest as an engine runs it, at the lowest priority. On a busy machine it gets only the CPU time that other threads
do not use. Prints medians, their ratio, and the time that 140 GB would take at the digest's rate (computed, not
measured). Also prints the CPU seconds per GB of the digest and of the bare read. The digest needs one core for each 1.5
to 2 GB/s, whatever the disk's rate. The last figure is the time of the fingerprint, which reads only samples of the
files, when no file is in the page cache. `--json PATH` writes the figures to a file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least_one
from flexkv.weights.digest import BLOCK_BYTES, RANGE_BYTES, digest_files, ranges_of, readers_here
from flexkv.weights.files import FileState
from flexkv.weights.fingerprint import sampled_identity

GB = 1_000_000_000
FILE_BYTES = 1 << 30
WRITE_BYTES = 64 << 20
GOAL_RATIO = 0.8
"""The rate of the digest should be at least this share of the rate of a bare read."""
LARGE_BYTES = 140 * GB
"""Size of the weights of a model with 70 billion parameters of two bytes."""
MOST_TABLE_TENSORS = 300


def write_files(folder: Path, size: int) -> list[Path]:
    """Writes safetensors files of random bytes to the disk, and drops them from the page cache."""
    random = np.random.default_rng(0)
    files = []
    for number in range(max(1, size // FILE_BYTES)):
        file = folder / f"model-{number:05d}.safetensors"
        of_tensor = FILE_BYTES // MOST_TABLE_TENSORS
        entries = {
            f"model.layers.{tensor}.weight": {
                "dtype": "U8",
                "shape": [of_tensor],
                "data_offsets": [tensor * of_tensor, (tensor + 1) * of_tensor],
            }
            for tensor in range(MOST_TABLE_TENSORS)
        }
        head = json.dumps(entries).encode()
        with file.open("wb") as output:
            output.write(len(head).to_bytes(8, "little") + head)
            for _ in range(FILE_BYTES // WRITE_BYTES):
                output.write(random.bytes(WRITE_BYTES))
            output.flush()
            os.fsync(output.fileno())
            os.posix_fadvise(output.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        files.append(file)
    return files


def bare_read(files: list[Path]) -> None:
    """Reads the same ranges as the digest, with as many threads and equally large blocks, and does nothing with the
    bytes.
    """
    ranges = deque((file, number) for file in files for number in range(ranges_of(file.stat().st_size)))

    def read() -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            while True:
                try:
                    file, number = ranges.popleft()
                except IndexError:
                    return
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
                size = os.fstat(descriptor).st_size
                at, end = number * RANGE_BYTES, min((number + 1) * RANGE_BYTES, size)
                while at < end:
                    at += os.preadv(descriptor, [block], at)
                os.close(descriptor)

    threads = [threading.Thread(target=read) for _ in range(readers_here())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def digest(files: list[Path], background: bool) -> None:
    states = {file: FileState.of(file) for file in files}
    digest_files(states, threading.Event(), lambda *_: None, background)


def seconds(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def cpu_seconds(run: Callable[[], object]) -> float:
    """Returns the CPU seconds of all threads of this process while `run` runs."""
    begun_s = time.process_time()
    run()
    return time.process_time() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=int, default=8, help="GiB of files")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: the system's for such files"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {"bare read": [], "digest": [], "background": []}
    with tempfile.TemporaryDirectory(prefix="flexkv-weights-", dir=arguments.folder) as made:
        files = write_files(Path(made), arguments.gb << 30)
        size = sum(file.stat().st_size for file in files)
        sampled_s = seconds(lambda: sampled_identity(Path(made)))
        bare_cpu_s = cpu_seconds(lambda: bare_read(files))
        digest_cpu_s = cpu_seconds(lambda: digest(files, background=False))
        for _ in range(arguments.rounds):
            rows["bare read"].append(seconds(lambda: bare_read(files)))
            rows["digest"].append(seconds(lambda: digest(files, background=False)))
            rows["background"].append(seconds(lambda: digest(files, background=True)))
    rates = {name: size / statistics.median(times) / GB for name, times in rows.items()}
    # Ratios are taken within a round, because a shared machine is faster in one round than in another.
    ratios = {
        name: statistics.median(bare / own for bare, own in zip(rows["bare read"], rows[name], strict=True))
        for name in ("digest", "background")
    }
    large_s = LARGE_BYTES / GB / rates["digest"]
    print(f"{len(files)} files, {size / GB:.1f} GB, {readers_here()} threads, load {os.getloadavg()[0]:.1f}")
    for name, rate in rates.items():
        ratio = f", {ratios[name]:.2f} of a bare read (reach {GOAL_RATIO})" if name in ratios else ""
        print(f"{name:12} {rate:6.2f} GB/s{ratio}")
    print(
        f"CPU seconds per GB: bare read {bare_cpu_s / size * GB:.2f}, digest {digest_cpu_s / size * GB:.2f}"
    )
    print(f"140 GB at the digest's rate, computed: {large_s:.0f} s")
    print(f"fingerprint by samples, first time: {sampled_s:.3f} s")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        cpu_s = {"bare read": bare_cpu_s / size * GB, "digest": digest_cpu_s / size * GB}
        found = {
            "GB/s": rates,
            "CPU seconds per GB": cpu_s,
            "ratio": ratios,
            "140 GB computed, s": large_s,
            "fingerprint, s": sampled_s,
        }
        arguments.json.write_text(json.dumps(found | {"load": os.getloadavg()[0]}, indent=1))


if __name__ == "__main__":
    main()
