"""Tests how settings are loaded: their sources and which source wins, aliases, the origin of each value, and errors for
invalid values.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from flexkv.config import FlexKVConfig, load_config
from flexkv.config.model import setting_fields
from flexkv.config.names import environment_name
from flexkv.errors import ConfigError

GIB = 1 << 30


def write(tmp_path: Path, text: str) -> dict[str, str]:
    """Writes `text` to a YAML file. Returns an environment whose FLEXKV_CONFIG names the file."""
    path = tmp_path / "flexkv.yaml"
    path.write_text(text)
    return {"FLEXKV_CONFIG": str(path)}


def test_nothing_given_is_all_defaults() -> None:
    config = load_config(None, {})
    assert config == FlexKVConfig()
    assert {row.origin for row in config.rows()} == {"default"}
    assert config.host.bytes is None
    assert config.host.memory_share == 0.5


def test_the_stronger_source_wins_and_each_origin_is_told(tmp_path: Path) -> None:
    environ = write(
        tmp_path, "host:\n  bytes: 1GiB\n  verify: true\nload:\n  deadline_s: 1\nstore: {mode: lazy}\n"
    )
    environ |= {"FLEXKV_HOST_BYTES": "2GiB", "FLEXKV_LOAD_DEADLINE_S": "2"}
    config = load_config({"host.bytes": "3GiB"}, environ)
    assert (config.host.bytes, config.load.deadline_s, config.host.verify) == (3 * GIB, 2.0, True)
    assert config.origin("host.bytes") == "engine extra config"
    assert config.origin("load.deadline_s") == "env FLEXKV_LOAD_DEADLINE_S"
    assert config.origin("host.verify") == f"file {tmp_path}/flexkv.yaml line 3"
    assert config.origin("store.mode") == f"file {tmp_path}/flexkv.yaml line 6"
    assert config.origin("store.tokens") == "default"


@pytest.mark.parametrize("key", list(setting_fields()))
def test_every_setting_can_be_given_by_its_environment_name(key: str) -> None:
    section, name = key.split(".")
    default = getattr(getattr(FlexKVConfig(), section), name)
    config = load_config(None, {environment_name(key): "none" if default in (None, ()) else str(default)})
    assert getattr(getattr(config, section), name) == default
    assert config.origin(key) == f"env {environment_name(key)}"


def test_every_setting_says_why_it_exists() -> None:
    assert all(row.description for row in FlexKVConfig().rows())


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ({"cpu_bytes_to_use_per_rank": 3 * GIB}, "host.bytes_per_rank", 3 * GIB),
        ({"cpu_bytes_to_use_per_rank": 3.0 * GIB}, "host.bytes_per_rank", 3 * GIB),
        ({"lazy_offload": True}, "store.mode", "lazy"),
        ({"lazy_offload": "false"}, "store.mode", "eager"),
        ({"save_decode_cache": False}, "store.tokens", "prompt"),
        ({"save_decode_cache": True}, "store.tokens", "all"),
        ({"save_partial_blocks": True}, "store.partial_blocks", True),
        ({"save_unfull_chunk": True}, "store.partial_blocks", True),
        ({"save_unfull_chunk": True, "store.partial_blocks": True}, "store.partial_blocks", True),
        ({"host": {"bytes": "40GiB"}}, "host.bytes", 40 * GIB),
        ({"host.bytes": 123}, "host.bytes", 123),
        ({"host": {"huge_pages": False}}, "host.huge_pages", "off"),
        ({"transfer.copy_threads": "3"}, "transfer.copy_threads", 3),
        ({"host.verify_threads": "16"}, "host.verify_threads", 16),
        ({"host": {"verify_threads": 1}}, "host.verify_threads", 1),
    ],
)
def test_extra_config_spellings(extra: Mapping[str, object], key: str, value: object) -> None:
    config = load_config(extra, {})
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value
    assert config.origin(key) == "engine extra config"


def test_aliases_work_in_yaml_and_environment(tmp_path: Path) -> None:
    config = load_config(None, write(tmp_path, "lazy_offload: yes\n") | {"FLEXKV_SAVE_DECODE_CACHE": "0"})
    assert (config.store.mode, config.store.tokens) == ("lazy", "prompt")
    assert config.origin("store.tokens") == "env FLEXKV_SAVE_DECODE_CACHE"


def test_a_stronger_source_may_size_the_host_tier_in_the_other_way() -> None:
    config = load_config({"cpu_bytes_to_use_per_rank": 5}, {"FLEXKV_HOST_BYTES": "7"})
    assert (config.host.bytes, config.host.bytes_per_rank) == (None, 5)
    assert config.origin("host.bytes") == "default"


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"host.byts": 1}, ["'host.byts'", "engine extra config", "value 1", "did you mean 'host.bytes'"]),
        ({"bytes_per_rank": 1}, ["'bytes_per_rank'", "did you mean 'host.bytes_per_rank'"]),
        ({"lazy_ofload": True}, ["did you mean 'lazy_offload'"]),
        ({"zzzz": 1}, ["unknown setting 'zzzz'", "no name is near it", "`flexkv config show` lists all"]),
        ({"host": {"bytes": {"x": 1}}}, ["'host.bytes.x'"]),
        ({"host": 3}, ["'host'", "section", "memory_share"]),
        ({"host.bytes": "40G"}, ["'host.bytes'", "'40G'", "GiB"]),
        ({"host.bytes": 0}, ["'host.bytes'", "value 0", "expected 1 or more"]),
        ({"host.bytes": "0.3B"}, ["'host.bytes'", "0.3"]),
        ({"host.bytes": "1" + 400 * "0" + ".5 B"}, ["'host.bytes'", "no whole number of bytes"]),
        ({"host.memory_share": 1.5}, ["'host.memory_share'", "1.5", "expected at most 1"]),
        ({"host.units_per_node": True}, ["'host.units_per_node'", "True", "expected a number"]),
        ({"host.extent_bytes": "3MB"}, ["'host.extent_bytes'", "multiple of 2097152"]),
        ({"host.extent_bytes": "2GiB"}, ["'host.extent_bytes'", "expected at most 1073741824"]),
        ({"host.memory_share": "50%"}, ["'50%': expected a number, more than 0, at most 1"]),
        ({"host.verify": "maybe"}, ["'maybe': expected true or false"]),
        (
            {"host.verify_threads": 0},
            ["'host.verify_threads'", "extra config", "value 0", "expected 1 or more"],
        ),
        ({"host.verify_threads": 17}, ["'host.verify_threads'", "value 17", "expected at most 16"]),
        ({"host.verify_threads": "two"}, ["'two': expected a whole number, 1 or more, at most 16"]),
        ({"host.verify_threads": True}, ["'host.verify_threads'", "True", "expected a number"]),
        ({"host.numa_node": True}, ["'host.numa_node'", "True", "expected a number"]),
        ({"disk.ttl_s": "1 day"}, ["'1 day': expected a whole number of seconds"]),
        ({"load.deadline_s": -1}, ["value -1: expected more than 0"]),
        ({"load.prefetch_layers": "x"}, ["expected a whole number, 2 or more, at most 16"]),
        ({"store.mode": "eagre"}, ["'store.mode'", "'eagre'", "'eager', 'lazy' or 'layerwise'"]),
        ({"lazy_offload": "perhaps"}, ["'lazy_offload'", "'perhaps'", "true or false"]),
        ({"load.deadline_s": float("nan")}, ["'load.deadline_s'", "nan"]),
        ({"load.deadline_s": float("inf")}, ["'load.deadline_s'", "inf"]),
        ({"transfer.copy_threads": "two"}, ["'transfer.copy_threads'", "'two'", "'auto'"]),
        ({"transfer.copy_threads": "٣"}, ["'transfer.copy_threads'", "'٣'", "'auto'"]),
        ({"identity.model": 1.5}, ["'identity.model'", "1.5", "string"]),
        ({"identity.model": "a\ud800"}, ["'identity.model'", "'a\\ud800'", "expected text in UTF-8"]),
        ({"remote.tenant": "a\0b"}, ["'remote.tenant'", "'a\\x00b'", "expected text without NUL"]),
        ({"remote.rdma_devices": ["\udcff"]}, ["'remote.rdma_devices'", "expected text in UTF-8"]),
        ({"lazy_offload": True, "store.mode": "eager"}, ["'lazy_offload'", "'store.mode'", "contradict"]),
        ({"host.bytes": 1, "host": {"bytes": 2}}, ["contradict"]),
        ({"save_unfull_chunk": True, "save_partial_blocks": False}, ["contradict"]),
        ({"host.bytes": 1, "cpu_bytes_to_use_per_rank": 2}, ["'host.bytes'", "'cpu_bytes_to_use_per_rank'"]),
        ({1: 2}, ["setting names are strings", "1"]),
        ([1], ["expected a mapping", "list"]),
    ],
)
def test_bad_extra_config_names_key_source_value_and_what_is_allowed(extra: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, {})  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("FLEXKV_HOST_BYTES", "", ["'host.bytes'", "env FLEXKV_HOST_BYTES", "''"]),
        ("FLEXKV_STORE_MODE", "Lazy!", ["env FLEXKV_STORE_MODE", "'Lazy!'"]),
        ("FLEXKV_LOAD_INFLIGHT_PAGES", "1.5", ["env FLEXKV_LOAD_INFLIGHT_PAGES", "'1.5'"]),
        # In an environment variable, Python replaces each byte that is not UTF-8 by a surrogate like this one.
        ("FLEXKV_IDENTITY_NAMESPACE", "\udcff", ["env FLEXKV_IDENTITY_NAMESPACE", "expected text in UTF-8"]),
    ],
)
def test_a_bad_variable_is_named_with_its_value(variable: str, value: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {variable: value})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("FLEXKV_HOST_BYTE", "did you mean FLEXKV_HOST_BYTES?"),
        ("FLEXKV_LAZY_OFLOAD", "did you mean FLEXKV_LAZY_OFFLOAD?"),
        ("FLEXKV_DEBUG", "`flexkv config docs` lists all variables"),
        ("flexkv_host_bytes", "did you mean FLEXKV_HOST_BYTES?"),
        ("FLEXKV_host_bytes", "did you mean FLEXKV_HOST_BYTES?"),
        ("Flexkv_Config", "did you mean FLEXKV_CONFIG?"),
        ("FLEX_KV_LOAD_MODE", "did you mean FLEXKV_LOAD_MODE?"),
    ],
)
def test_a_variable_that_nothing_reads_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setattr("flexkv.observe.log._warned", set())
    for _ in range(2):
        assert load_config(None, {variable: "1"}) == FlexKVConfig()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        f"environment variable {variable} is no setting of flexkv and has no effect: {hint}"
    )


MAY_BE_EMPTY = (
    "disk.folders",
    "identity.model",
    "identity.namespace",
    "transfer.ways_file",
    *(f"remote.{name}" for name in ("urls", "user", "password_file", "ca_file", "tenant", "rdma_devices")),
)


@pytest.mark.parametrize("key", MAY_BE_EMPTY)
def test_lists_and_texts_may_be_empty(key: str) -> None:
    variable = environment_name(key)
    config = load_config({}, {variable: ""})
    assert config.origin(key) == f"env {variable}"
    assert {row.key: row.value for row in config.rows()}[key] in ((), "")


@pytest.mark.parametrize("key", sorted({*setting_fields()} - {*MAY_BE_EMPTY}))
def test_an_empty_variable_is_refused_by_its_name(key: str) -> None:
    variable = environment_name(key)
    with pytest.raises(ConfigError) as caught:
        load_config({}, {variable: ""})
    assert f"from env {variable} has the value '': expected " in str(caught.value)
    assert str(caught.value).endswith("an empty variable does not stand for the default: unset it")
    with pytest.raises(ConfigError) as caught:
        load_config({key: ""}, {})
    assert "unset" not in str(caught.value)


def test_names_of_another_system_are_one_short_error() -> None:
    """Names of another system's settings cause one short error. It names each unknown setting once, with the most
    similar valid name if there is one, and does not list all settings.
    """
    extra = {"local_cpu": True, "max_local_cpu_size": 5, "remote_url": "x", "host.byts": 1}
    with pytest.raises(ConfigError) as caught:
        load_config(extra, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(extra)
    assert all(len(line) < 200 for line in lines)
    assert "did you mean 'host.bytes'?" in lines[-1]


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {
        "FLEXKV_CUDA": "0",
        "FLEXKV_SANITIZE": "address",
        "FLEXKV_SERVICE_HOST": "10.0.0.1",
        "FLEX_KV_SERVICE_HOST": "10.0.0.1",
        "FLEX_KV_PORT": "tcp://10.0.0.1:80",
        "FLEXKV_PORT": "tcp://10.0.0.1:80",
        "FLEXKV_CACHE_PORT_80_TCP_ADDR": "10.0.0.1",
        "FLEXKV_CACHE_PORT_80_TCP_PORT": "80",
        "FLEXKV_CACHE_SERVICE_PORT": "80",
        "FLEXKV_CACHE_SERVICE_PORT_HTTP": "80",
        "PATH": "/bin",
    }
    assert load_config(None, environ) == FlexKVConfig()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host:\n  bytes: 1\n  bytes: 2\n", ["line 3", "'host.bytes'", "line 2"]),
        ("host:\n  bytes: 1\nhost.bytes: 2\n", ["line 2", "line 3", "contradict"]),
        ("host:\n  byts: 1\n", ["line 2", "'host.byts'", "'host.bytes'"]),
        ("host: 5\n", ["'host'", "line 1", "section"]),
        ("- host\n", ["line 1", "expected a mapping", "sequence"]),
        ("host:\n  bytes: [1, 2]\n", ["line 2", "'host.bytes'", "[1, 2]", "a whole number"]),
        ("disk:\n  folders: [{a: 1}]\n", ["line 2", "'disk.folders'", "a list of values"]),
        ("disk:\n  folders: [/a, b]\n", ["line 2", "'disk.folders'", "absolute paths, got 'b'"]),
        ("host:\n bytes: 1\n  x: 2\n", ["line 3 column 4: not valid YAML: mapping values are not allowed"]),
        ("host:\n  bytes:\n    x: 1\n", ["line 3", "'host.bytes'", "mapping"]),
        ("a: &a\n  b: *a\n", ["line 1"]),
        ("[1]: 2\n", ["line 1", "strings"]),
        ("host: {bytes\n", ["not valid YAML", "line"]),
        ("disk:\n  folders: [2024-99-99]\n", ["line 2: '2024-99-99'", "put a string in quotes"]),
        ("disk:\n  folders: 2024-99-99\n", ["line 2: '2024-99-99'", "put a string in quotes"]),
        ("host:\n  bytes: !!python/object/apply:os.getpid []\n", ["host.bytes"]),
        ("host:\n  verify: !!python/name:os.getpid\n", ["not valid YAML", "python/name"]),
    ],
)
def test_bad_yaml_names_file_and_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, write(tmp_path, text))
    for part in (*parts, "flexkv.yaml"):
        assert part in str(caught.value)


def test_folders_may_be_a_list_in_yaml(tmp_path: Path) -> None:
    config = load_config(None, write(tmp_path, "disk:\n  folders:\n    - /a\n    - /b\n"))
    assert config.disk.folders == ("/a", "/b")
    assert config.origin("disk.folders") == f"file {tmp_path}/flexkv.yaml line 2"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FLEXKV_CONFIG=.*missing\.yaml.*No such file"):
        load_config(None, {"FLEXKV_CONFIG": str(tmp_path / "missing.yaml")})
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"FLEXKV_CONFIG": str(tmp_path)})
    place = f"FLEXKV_CONFIG={str(tmp_path)!r}"
    assert str(caught.value) == f"{place}: expected a regular file, got a folder, pipe or device"
    (tmp_path / "latin.yaml").write_bytes(b"host:\n  # caf\xe9\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(None, {"FLEXKV_CONFIG": str(tmp_path / "latin.yaml")})


@pytest.mark.parametrize("text", ["", "# nothing\n", "host:\nstore:\n", "host:\n  bytes: null\n"])
def test_empty_files_and_sections_set_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(None, write(tmp_path, text)).host == FlexKVConfig().host


def test_bare_on_and_off_in_yaml_are_words(tmp_path: Path) -> None:
    for word in ("on", "off", "auto"):
        assert load_config(None, write(tmp_path, f"disk:\n  gds: {word}\n")).disk.gds == word
    with pytest.raises(ConfigError, match=r"disk\.gds.*'sometimes'"):
        load_config({"disk.gds": "sometimes"}, {})


@pytest.mark.parametrize(("word", "value"), [("true", "on"), ("False", "off"), ("on", "on"), ("off", "off")])
def test_true_and_false_say_the_same_in_yaml_and_environment(tmp_path: Path, word: str, value: str) -> None:
    assert load_config(None, write(tmp_path, f"disk:\n  gds: {word}\n")).disk.gds == value
    assert load_config(None, {"FLEXKV_DISK_GDS": word}).disk.gds == value


def test_a_bare_off_in_yaml_is_the_word(tmp_path: Path) -> None:
    assert load_config(None, write(tmp_path, "host:\n  huge_pages: off\n")).host.huge_pages == "off"


def test_a_bad_value_is_found_even_where_a_stronger_source_overrides_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        load_config({"host.bytes": 1}, write(tmp_path, "host:\n  bytes: many\n"))


GDS_STORES = {"disk.gds": "on", "disk.gds_stores": True}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("disk.gds", "auto", "on"), ("disk.mode", "evict", "through"), ("store.mode", "lazy", "eager")],
)
def test_settings_that_do_not_go_together(key: str, value: str, allowed: str) -> None:
    message = f"'{key}' from env {environment_name(key)} has the value '{value}': expected '{allowed}' with "
    extra = {name: other for name, other in GDS_STORES.items() if name != key}
    with pytest.raises(ConfigError, match=re.escape(message + "'disk.gds_stores' from engine extra config")):
        load_config(extra, {environment_name(key): value})
    assert load_config({"disk.gds_stores": False}, {environment_name(key): value}).disk.gds_stores is False
    # Combinations of settings are checked after all sources have been merged.
    assert load_config(GDS_STORES | {key: allowed}, {environment_name(key): value}).disk.gds_stores


def test_configuration_is_frozen_and_pickles_with_its_origins() -> None:
    config = load_config({"host.bytes": "1GiB", "lazy_offload": True}, {})
    with pytest.raises(ValidationError, match="frozen"):
        config.host.bytes = 5  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.host = FlexKVConfig().host  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.origin("store.mode") == "engine extra config"


def test_origin_of_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'host\.bytes'"):
        FlexKVConfig().origin("host.byte")


def _takes_numbers(key: str) -> bool:
    for number in (1, 2 << 20):
        try:
            section, name = key.split(".")
            return type(getattr(getattr(load_config({key: number}, {}), section), name)) in (int, float)
        except ConfigError:
            continue
    return False


@pytest.mark.parametrize("key", [key for key in setting_fields() if _takes_numbers(key)])
def test_far_too_much_of_anything_is_refused_by_its_name(key: str) -> None:
    """A number that is far too large is refused with the setting's name. Without a limit, such a value would fail only
    at the engine's start, with an overflow or with thousands of threads.
    """
    with pytest.raises(ConfigError) as caught:
        load_config({key: 1 << 62}, {})
    assert f"{key!r} from engine extra config has the value {1 << 62}: " in str(caught.value)
    assert re.search("less than|at most|from 1 to 64", str(caught.value))


@pytest.mark.parametrize("key", ["disk.folders", "remote.urls", "plugins.folder", "peers.folder"])
def test_error_for_an_endless_value_is_short(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({key: 100_000 * "a"}, {})
    assert len(str(caught.value)) < 500


def test_copy_threads_auto_leaves_small_machines_to_the_engine() -> None:
    transfer = FlexKVConfig().transfer
    assert [transfer.copy_thread_count(cpus) for cpus in (1, 4, 5, 64)] == [1, 1, 2, 2]
    assert load_config({"transfer.copy_threads": 3}, {}).transfer.copy_thread_count(1) == 3


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yaml"
    file.write_text("host:\n  bytes: 12x\ndisk:\n  streem: true\n  mode: through\nload:\n  mode: sometimes\n")
    with pytest.raises(ConfigError) as caught:
        load_config({"load.deadline_s": -1}, {"FLEXKV_CONFIG": str(file), "FLEXKV_STORE_MODE": "never"})
    first, *faults = str(caught.value).splitlines()
    assert first == "5 settings are wrong:"
    places = [
        f"{file} line 2",
        f"{file} line 4",
        f"{file} line 7",
        "env FLEXKV_STORE_MODE",
        "engine extra config",
    ]
    assert all(place in fault for place, fault in zip(places, faults, strict=True))


def test_what_comes_before_the_end_of_a_readable_file_is_said_too(tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yaml"
    file.write_text("host:\n  bytes: 12x\n7: true\n[1]: 2\n")
    with pytest.raises(
        ConfigError, match=r"2 settings are wrong:\n- 'host.bytes'.*12x.*\n- .*setting '7'|names are"
    ):
        load_config({}, {"FLEXKV_CONFIG": str(file)})


@pytest.mark.parametrize(
    "url", ["redis://:{}@host", "redis://host?password={}", "mooncake://a:1,redis://u:{}@b:2"]
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.urls") as error:
        load_config({"remote.urls": url.format("s3/cr:t")}, {})
    assert "s3/cr:t" not in str(error.value)


def test_failed_requests_are_only_risked_where_gds_is_asked_for() -> None:
    risky = {"disk.gds_may_fail_requests": True}
    with pytest.raises(ConfigError, match=r"disk\.gds.*'on'"):
        load_config(risky, {})
    assert load_config(risky | {"disk.gds": "on"}, {}).disk.gds_may_fail_requests
    assert not load_config({"disk.gds": "on"}, {}).disk.gds_may_fail_requests
