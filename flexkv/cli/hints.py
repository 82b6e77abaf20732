"""Hints on what to change on a machine so that flexkv runs faster, each with the command that makes the change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts on which the hints depend.

    Attributes:
        private_pages, shared_pages: the kernel's settings for transparent huge pages in private and in shared memory,
            such as "madvise".
        huge_page_bytes: size of a huge page; 0 if the kernel has none.
        huge_pages_free: number of reserved huge pages that are unused.
        host_bytes: size of the host tier with the current settings.
        uring_refusal: why io_uring cannot be used; empty if it can.
        has_gpu: whether an NVIDIA driver is loaded.
        with_cuda: whether the native core was built with a CUDA toolkit.
    """

    private_pages: str
    shared_pages: str
    huge_page_bytes: int
    huge_pages_free: int
    host_bytes: int
    uring_refusal: str
    has_gpu: bool
    with_cuda: bool


def gpu_driver_is_loaded(root: Path = Path("/")) -> bool:
    return (root / "proc/driver/nvidia/version").exists()


def hints(machine: Machine) -> list[str]:
    """Returns one line per hint. A line has the finding, the cost of the finding, and the command that makes the
    change."""
    found = []
    if machine.private_pages == "never":
        found.append(
            "no huge pages for private memory, so copies of small runs are slower: "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    reserved = machine.huge_pages_free * machine.huge_page_bytes
    if machine.huge_page_bytes and machine.shared_pages == "deny" and reserved < machine.host_bytes:
        pages = -(-machine.host_bytes // machine.huge_page_bytes)
        found.append(
            "no huge pages for memory that processes share, so where an engine has several copies are slower: "
            "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled (flexkv asks for its own), "
            f"or for one pool: sudo sysctl vm.nr_hugepages={pages} (takes that memory from everything else)"
        )
    if machine.uring_refusal:
        found.append(
            f"io_uring is refused ({machine.uring_refusal}), so disks are read and written by threads, at more CPU "
            "time: sudo sysctl kernel.io_uring_disabled=0; in a container also a seccomp profile that allows it, as "
            "docker run --security-opt seccomp=unconfined"
        )
    if machine.has_gpu and not machine.with_cuda:
        found.append(
            "there is a GPU, and the native core was built without nvcc, so short runs are left to the copy "
            "engine: install the CUDA toolkit, then FLEXKV_CUDA=1 make build (FLEXKV_NVCC=PATH where it is not found)"
        )
    return found
