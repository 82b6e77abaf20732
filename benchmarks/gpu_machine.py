"""Collects facts about a machine with a GPU, and lists what the machine lacks. Imports no module that must be built
first."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAYS_S = 30.0
"""Seconds that a program, such as nvidia-smi, may take to print its facts. A slower program counts as not answering."""
CORE_SAYS_S = 120.0
"""Seconds that flexkv's native core may take to describe the GPUs. A slower core counts as not answering. The limit is
longer than `SAYS_S`, because the core initialises the driver.
"""
DRIVER = Path("/proc/driver/nvidia/version")
CONTROL_DEVICE = Path("/dev/nvidiactl")
STORAGE_DRIVER = Path("/proc/driver/nvidia-fs/version")
PACKAGES = ("torch", "vllm", "sglang", "tensorrt_llm", "cuda-bindings", "nvidia-cufile", "nvidia-cufile-cu12")
NONE = "none"
SOURCE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py", ".pyi")


def machine(device: int) -> dict[str, str]:
    """Returns facts about the machine, by name. If a fact cannot be found out, its value is the reason."""
    query = ["nvidia-smi", f"--id={device}", "--format=csv,noheader"]
    query.append("--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max")
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "GPU, driver, memory, PCIe generation and width": said(query),
        "GPUs": str(gpus()),
        "nvcc": said([os.environ.get("FLEXKV_NVCC") or "nvcc", "--version"]).splitlines()[-1],
        "nvidia-fs": STORAGE_DRIVER.read_text().strip() if STORAGE_DRIVER.exists() else NONE,
        "system": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs",
        "commit": said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "source": source_digest(),
    }
    return found | {name: _version(name) for name in PACKAGES}


def said(command: list[str]) -> str:
    """Runs a program and returns its output, or the reason why there is none. The text is never empty."""
    if shutil.which(command[0]) is None:
        return f"unknown: no {command[0]} here"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAYS_S)
    except subprocess.TimeoutExpired:
        return f"unknown: {command[0]} did not answer in {SAYS_S:.0f} s"
    if done.returncode != 0 or not done.stdout.strip():
        return f"unknown: {(done.stderr or done.stdout).strip()[:120] or 'no answer'}"
    return done.stdout.strip()


def source_digest() -> str:
    """Returns a digest of the names and contents of all sources that are built or measured. Works without `.git`."""
    digest = hashlib.sha256()
    for folder in ("csrc", "flexkv", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def gpus() -> int:
    """Returns the number of GPUs that nvidia-smi lists."""
    listed = said(["nvidia-smi", "--list-gpus"])
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def not_here() -> dict[str, str]:
    """Returns the measurements that are impossible on this machine: maps each one's name in docs/gpu-results.md to the
    reason.
    """
    found = {}
    if (count := gpus()) < 2:
        for name in ("a device other than 0", "tensor parallel ranks on GPUs of their own"):
            found[name] = f"{count} GPU(s) in this machine"
    for module, name in (("vllm", "vLLM"), ("sglang", "SGLang"), ("tensorrt_llm", "TensorRT-LLM")):
        if importlib.util.find_spec(module) is None:
            found[f"{name} on the GPU"] = f"{module} is not installed"
    if not STORAGE_DRIVER.exists():
        found["GPUDirect Storage, direct"] = "nvidia-fs is not loaded"
    return found


def driver_refusal() -> str:
    """Returns why there is no GPU to build for; empty if there is one. Looks in several places, because in some
    containers /proc does not show the driver.
    """
    if DRIVER.exists() or CONTROL_DEVICE.exists() or gpus():
        return ""
    return "no NVIDIA driver is loaded"


def refusal() -> str:
    """Returns why stages that need the native core cannot run on this machine; empty if they can. The driver is called
    in a child process.
    """
    if lacking := driver_refusal():
        return lacking
    program = "import json; from flexkv import c_ext; print(json.dumps(c_ext.cuda_info()))"
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CORE_SAYS_S)
    except subprocess.TimeoutExpired:
        return f"the driver did not answer in {CORE_SAYS_S:.0f} s"
    if done.returncode != 0:
        return f"the native core cannot be loaded: {done.stderr.strip()[-200:]}"
    info = json.loads(done.stdout)
    if not info["device_count"]:
        return str(info["reason"])
    return "" if info["built"] else "the native core was built without CUDA"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NONE
