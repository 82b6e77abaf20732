"""Another package is named flexkv, too. If an engine tries to import that package's modules, the error names the
engine's flags for this package.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from flexkv.errors import ConfigError

LINKER_FLAG = "--enable-unified-cache-external-linker"

# The code with which SGLang 0.5.23 imports the other package: these names, in this order. If it gets an ImportError,
# SGLang takes the package for not installed.
SGLANG_GUARD = """
try:
    from flexkv.common.request import KVResponseStatus
    from flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
    from flexkv.integration.config import FlexKVConfig
    from flexkv.kvmanager import KVManager
    from flexkv.server.client import KVTPClient
    from flexkv.transfer.layerwise import build_layerwise_eventfd_socket_path
    from flexkv.transfer_manager import TransferManagerOnRemote
except ImportError as error:
    raise RuntimeError("FlexKV is not installed") from error
"""


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("flexkv.common.request", LINKER_FLAG),
        ("flexkv.kvmanager", LINKER_FLAG),
        ("flexkv.kvmanager", "FlexKVScheduler"),
        ("flexkv.integration.sglang.connector", LINKER_FLAG),
        ("flexkv.integration.tensorrt_llm.trtllm_adapter", "flexkv.adapters.tensorrt_llm"),
    ],
)
def test_a_module_of_the_other_package_names_what_to_set_instead(module: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        importlib.import_module(module)
    assert instead in str(caught.value)
    assert "another package named flexkv" in str(caught.value)


def test_what_sglang_prints_at_its_start_names_the_flags() -> None:
    done = subprocess.run([sys.executable, "-c", SGLANG_GUARD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("flexkv.errors.ConfigError: flexkv.common belongs to another package named flexkv")
    assert LINKER_FLAG in last
    assert "is not installed" not in done.stderr


def test_an_import_error_would_have_been_hidden() -> None:
    """A control: without flexkv's own error, SGLang would only report that flexkv is not installed."""
    program = SGLANG_GUARD.replace("flexkv.common.request", "flexkv.no_such_module.request")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: FlexKV is not installed"
