"""SGLang's own flag --enable-flexkv ends with an error that names the flags to use instead. The sample file contains
these flags.
"""

from __future__ import annotations

from tests.engines_sglang.conftest import Parts


def test_sglangs_own_connector_ends_with_the_flags_of_the_linker(parts: Parts) -> None:
    found = parts["own_flag_child"]["import"]
    assert found["error"].startswith("ConfigError: flexkv.common belongs to another package named flexkv")
    assert "--enable-unified-cache-external-linker" in found["error"]
    assert "not installed" not in found["trace"]


def test_sglang_takes_the_sample_of_its_arguments(parts: Parts) -> None:
    assert parts["own_flag_child"]["engine file"] == {
        "enabled": True,
        "backend": "dynamic",
        "config": {
            "linker": "FlexKVLinker",
            "linker_module_path": "flexkv.adapters.sglang",
            "linker_extra_config": {},
        },
    }
