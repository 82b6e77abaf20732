"""The declarations in csrc/cuda/driver.h agree with those of the real cuda.h, in CUDA 12 and 13."""

from __future__ import annotations

import re

import pytest

from build_support.ninja_file import ROOT
from tests.unit.cuda.toolkit import INCLUDES, compile_with_headers, require

HEADER = (ROOT / "csrc" / "cuda" / "driver.h").read_text()
FINDER = (ROOT / "csrc" / "cuda" / "driver.cpp").read_text()

OPAQUE = {"ContextHandle": "CUcontext", "StreamHandle": "CUstream", "EventHandle": "CUevent"}
"""For each handle type of driver.h, NVIDIA's name. Handles are pointers to opaque structures."""

STRUCTS = {
    "Uuid": ("CUuuid", {"bytes": "bytes"}),
    "MemoryLocation": ("CUmemLocation", {"type": "type", "id": "id"}),
    "BatchAttributes": (
        "CUmemcpyAttributes",
        {
            "order": "srcAccessOrder",
            "source_hint": "srcLocHint",
            "destination_hint": "dstLocHint",
            "flags": "flags",
        },
    ),
}
"""For each structure of driver.h: NVIDIA's name for it, and NVIDIA's name for each of its members. A structure comes
before the structures that contain it.
"""

VALUES = {
    "kSuccess": "CUDA_SUCCESS",
    "kErrorInvalidValue": "CUDA_ERROR_INVALID_VALUE",
    "kErrorNotReady": "CUDA_ERROR_NOT_READY",
    "kErrorCaptureImplicit": "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
    "kCaptureGlobal": "CU_STREAM_CAPTURE_MODE_GLOBAL",
    "kCaptureThreadLocal": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
    "kCaptureRelaxed": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "kNotCapturing": "CU_STREAM_CAPTURE_STATUS_NONE",
    "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
    "kEventBlockingSync": "CU_EVENT_BLOCKING_SYNC",
    "kEventDisableTiming": "CU_EVENT_DISABLE_TIMING",
    "kWriteValueDefault": "CU_STREAM_WRITE_VALUE_DEFAULT",
    "kHostRegisterPortable": "CU_MEMHOSTREGISTER_PORTABLE",
    "kHostRegisterDeviceMap": "CU_MEMHOSTREGISTER_DEVICEMAP",
    "kHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
    "kHostAllocDeviceMap": "CU_MEMHOSTALLOC_DEVICEMAP",
    "kAttributeMultiprocessors": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "kAttributeHostPointerIsDevicePointer": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "kMemoryTypeHost": "CU_MEMORYTYPE_HOST",
    "kMemoryTypeDevice": "CU_MEMORYTYPE_DEVICE",
    "kPointerMemoryType": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
    "SourceOrder::kStream": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
    "SourceOrder::kDuringApiCall": "CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL",
    "SourceOrder::kAny": "CU_MEMCPY_SRC_ACCESS_ORDER_ANY",
}

POINTERS = {"kLegacyStream": "CU_STREAM_LEGACY"}
"""Numbers of driver.h that are pointers in NVIDIA's header, such as `((CUstream)0x1)`. A compiler cannot compare them
in a static assertion."""

BATCH_OF = {12: "batch_12080", 13: "batch_13000"}
"""For each major version of CUDA, the entry of driver.h's table for this version's cuMemcpyBatchAsync."""

PROLOGUE = """
#include <cuda.h>
#include "cuda/driver.h"
#include "same_abi.h"
using namespace flexkv::cuda;
"""


def declared_values() -> set[str]:
    """Returns the constants that driver.h declares. If a constant belongs to an enumeration, its name begins with the
    enumeration's name.
    """
    enumerations = re.findall(r"^enum class (\w+) : int \{(.*?)^\};", HEADER, re.S | re.M)
    inner = {
        f"{name}::{value}" for name, body in enumerations for value in re.findall(r"^\s*(k\w+) =", body, re.M)
    }
    return inner | set(re.findall(r"^inline constexpr [\w:]+ (k\w+) =", HEADER, re.M))


def declared_functions() -> set[str]:
    """Returns the names of the entries in driver.h's table of functions."""
    (table,) = re.findall(r"^struct Driver \{(.*?)^\};", HEADER, re.S | re.M)
    return set(re.findall(r"\(\*(\w+)\)\(", table)) | set(re.findall(r"^  BatchCopy\d+ (\w+) =", table, re.M))


def found_functions() -> dict[str, str]:
    """Returns for each entry of the table the name that flexkv looks up in the driver."""
    asked = re.findall(r'\((?:find, )?"(cu[A-Z]\w+)", (?:\w+, )?d\.(\w+)\)', FINDER)
    return {field: name for name, field in asked}


def assertions(major: int) -> str:
    """Returns a program that compiles only if driver.h agrees with the cuda.h of CUDA `major`."""
    lines = [PROLOGUE, "namespace abi {"]
    for ours, theirs in OPAQUE.items():
        lines.append(
            f"template <> struct SameStruct<std::remove_pointer_t<{ours}>, std::remove_pointer_t<{theirs}>>"
            " : std::true_type {};"
        )
    lines.append("}")
    for ours, (theirs, members) in STRUCTS.items():
        lines.append(f"static_assert(sizeof({ours}) == sizeof({theirs}));")
        lines += [f"CHECK_MEMBER({ours}, {mine}, {theirs}, {other});" for mine, other in members.items()]
        lines.append(f"template <> struct abi::SameStruct<{ours}, {theirs}> : std::true_type {{}};")
    lines += [f"CHECK_VALUE({ours}, {theirs});" for ours, theirs in VALUES.items()]
    cuda_h = (INCLUDES[major][0] / "cuda.h").read_text()
    for ours, theirs in POINTERS.items():
        (number,) = re.findall(rf"^#define {theirs} +\(\(\w+\)(0x[0-9a-f]+)\)$", cuda_h, re.M)
        lines.append(f"CHECK_VALUE({ours}, {number});")
    lines += [
        f"CHECK_FUNCTION(Driver, {field}, {name});"
        for field, name in found_functions().items()
        if field not in BATCH_OF.values() or field == BATCH_OF[major]
    ]
    lines.append("static_assert(abi::same<FindFunction, decltype(&cuGetProcAddress)>());")
    return "\n".join(lines)


@pytest.mark.parametrize("major", [12, 13])
def test_driver_header_agrees_with_cuda(major: int) -> None:
    require(INCLUDES[major][0])
    done = compile_with_headers(assertions(major), major)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr == ""


def test_every_constant_and_function_is_compared() -> None:
    assert declared_values() == {*VALUES, *POINTERS}
    assert declared_functions() == set(found_functions())
    assert {"stream_create", "batch_12080", "copy_any"} <= declared_functions()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "CHECK_MEMBER(BatchAttributes, source_hint, CUmemcpyAttributes, dstLocHint);",
            "source_hint is elsewhere",
        ),
        (
            "struct Short { int type; }; CHECK_MEMBER(Short, type, CUmemcpyAttributes, flags);",
            "type is elsewhere",
        ),
        ("struct Wide { long long type; }; CHECK_MEMBER(Wide, type, CUmemLocation, type);", "another type"),
        (
            "CHECK_VALUE(kAttributeMultiprocessors, CU_DEVICE_ATTRIBUTE_WARP_SIZE);",
            "kAttributeMultiprocessors is not",
        ),
        ("CHECK_FUNCTION(Driver, mem_alloc, cuMemFree);", "mem_alloc is not cuMemFree"),
        ("CHECK_FUNCTION(Driver, event_record, cuStreamSynchronize);", "event_record is not"),
        ("CHECK_FUNCTION(Driver, batch_12080, cuMemcpyBatchAsync);", "batch_12080 is not"),
    ],
)
def test_control_a_wrong_declaration_does_not_compile(wrong: str, words: str) -> None:
    require(INCLUDES[13][0])
    done = compile_with_headers(f"{assertions(13)}\n{wrong}\n", 13)
    assert done.returncode != 0
    assert words in done.stderr
