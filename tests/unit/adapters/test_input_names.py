"""The name of an image identifies it across runs only if the name is a digest of the content. In another run, a
different image may have the same name.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from PIL import ExifTags, Image
from vllm.multimodal import hasher
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer

from flexkv.adapters.vllm.block_keys import EngineBlockKeys
from flexkv.adapters.vllm.input_names import DIGEST, InputNames
from flexkv.adapters.vllm.name_marks import PREFIX, marks_names
from flexkv.adapters.vllm.plugin import register
from tests.unit.adapters.disk_engines import in_turn
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, image, make_request

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
"""23 tokens: 5 full blocks of 4, and a partial tail of 3."""

IMAGE_AT = 9
"""Position of the image's first token, in the third block."""

TEXT_BEFORE, WHOLE = 8, 20
"""Lengths of two hits in tokens: of a hit that ends before the image's first block, and of a hit of all full blocks."""

CAT = hashlib.sha256(b"cat").hexdigest()
COUNTED = "renderer0-mm-1-image-0"
RUN = bytes(16)


def asks(engine: MiniEngine, name: str, identifier: str) -> int:
    """Runs a prompt with an image named `identifier`. Returns the number of tokens that the prompt got from the cache.
    Other prompts then evict the prompt's blocks from the engine's pool, so that lazy stores can store them.
    """
    hit = engine.run(make_request(PROMPT, name, mm_features=[image(identifier, IMAGE_AT, 3)]))
    for number in range(4):
        engine.run(make_request(range(1000 + 50 * number, 1020 + 50 * number), f"{name} {number}"))
    engine.forget()
    return hit


def makes(make_engine: Make, folder: Path, mode: str = "eager", **settings: Any) -> Make:
    """Returns a function that makes engines with one disk folder. Each call first closes the engine that the previous
    call made.
    """
    return in_turn(
        make_engine, folder, blocks=12, **{"store.mode": mode, "store.max_reference_share": 1.0} | settings
    )


def config(prefix_caching: bool, cache_gb: float, multimodal: bool = True) -> Any:
    inputs = SimpleNamespace(mm_processor_cache_gb=cache_gb, mm_hasher_algorithm="blake3")
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=inputs if multimodal else None),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


PLAIN = MultiModalHasher.__dict__["hash_kwargs"]


@pytest.fixture(autouse=True)
def of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes vLLM hash images through flexkv's plugin. Restores vLLM's own function when the test ends."""
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", PLAIN)
    register()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


# --- two runs over one disk folder ---

SCOPES = [
    pytest.param(COUNTED, True, id="counted"),
    pytest.param(CAT, True, id="counted-and-hashed-with-options"),
    pytest.param("my cat", False, id="of-a-client"),
]


@pytest.mark.parametrize(("mode", "partial"), [("eager", False), ("eager", True), ("lazy", False)])
@pytest.mark.parametrize(("identifier", "counted"), SCOPES)
def test_the_next_runs_image_of_the_same_name_is_computed(
    make_engine: Make, tmp_path: Path, identifier: str, counted: bool, mode: str, partial: bool
) -> None:
    make = makes(make_engine, tmp_path, mode, **{"store.partial_blocks": partial})
    one = make(names=InputNames(counted))
    assert asks(one, "one", identifier) == 0
    one.drain()
    assert asks(one, "again", identifier) >= WHOLE, "within the run the name stands for one image"
    two = make(names=InputNames(counted))
    assert asks(two, "two", identifier) == TEXT_BEFORE, "text before the image holds for good"


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_an_image_that_is_named_by_its_content_is_served_after_a_restart(
    make_engine: Make, tmp_path: Path, mode: str
) -> None:
    make = makes(make_engine, tmp_path, mode)
    one = make()
    assert asks(one, "one", CAT) == 0
    one.drain()
    assert asks(make(), "two", CAT) == WHOLE


def test_control_two_runs_of_one_name_serve_each_others_images(make_engine: Make, tmp_path: Path) -> None:
    make = makes(make_engine, tmp_path)
    one = make(names=InputNames(True, RUN))
    asks(one, "one", COUNTED)
    one.drain()
    assert asks(make(names=InputNames(True, RUN)), "two", COUNTED) == WHOLE


# --- keys ---


def rows(keys: EngineBlockKeys) -> list[bytes]:
    made = keys.keys()
    return [row.tobytes() for row in made]


def keys_of(features: Sequence[Any], names: InputNames) -> list[bytes]:
    keys = EngineBlockKeys(
        make_request(PROMPT, mm_features=list(features)), bytes(32), BLOCK_TOKENS, 1, names
    )
    return rows(keys)


def test_keys_from_the_images_first_block_on_are_the_runs() -> None:
    for identifier, counted in ((COUNTED, True), (CAT, True), ("my cat", False)):
        features = [image(identifier, IMAGE_AT, 3)]
        one, two = (keys_of(features, InputNames(counted)) for _ in range(2))
        assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False, False]


def test_a_named_image_behind_one_with_a_digest_keeps_the_first_ones_blocks() -> None:
    features = [image(CAT, 1, 2), image("my dog", 13, 2)]
    one, two = (keys_of(features, InputNames()) for _ in range(2))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, True, False, False]


def test_an_image_that_a_session_takes_later_is_the_runs_too() -> None:
    names = InputNames(True)
    request = make_request(PROMPT[:11])
    keys = EngineBlockKeys(request, bytes(32), BLOCK_TOKENS, 1, names)
    before = rows(keys)
    request.mm_features.append(image(COUNTED, 13, 2))
    request.append_output_token_ids(PROMPT[11:])
    assert rows(keys) == keys_of([image(COUNTED, 13, 2)], names)
    assert rows(keys)[: len(before)] == before
    other = keys_of([image(COUNTED, 13, 2)], InputNames(True))
    assert [a == b for a, b in zip(keys_of([image(COUNTED, 13, 2)], names), other, strict=True)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_the_parent_of_a_tail_is_the_runs_after_the_image() -> None:
    request = make_request(PROMPT, mm_features=[image(COUNTED, IMAGE_AT, 3)])
    names = InputNames(True)
    keys = EngineBlockKeys(request, bytes(32), BLOCK_TOKENS, 1, names)
    keys.keys()
    assert keys.parent(0) is None
    assert keys.parent(2) == bytes(request.block_hashes[1])
    assert keys.parent(5) == names.run + bytes(request.block_hashes[4])


# --- names that vLLM gives to images ---


def vllm_names(
    described: Any,
    uuid: str | None,
    options: dict[str, Any],
    algorithm: str,
    media: dict[str, Any] | None = None,
) -> list[str]:
    """Returns the names that vLLM's own front end gives to an image."""
    picture = Image.new("RGB", (4, 4), (1, 2, 3))
    items = MultiModalDataItems({"image": ImageProcessorItems([picture])})
    front = SimpleNamespace(
        model_config=described.model_config, config=described, _validate_mm_uuids=lambda *args: None
    )
    uuids = BaseRenderer._process_mm_uuids(
        front, {}, items, parse_mm_uuids({"image": [uuid]} if uuid else None), "renderer0-mm-1"
    )
    inputs = ProcessorInputs([], items, uuids, hf_processor_mm_kwargs=options, media_io_kwargs=media or {})
    return list(inputs.get_mm_hashes("model", algorithm)["image"])


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("cache_gb", [0, 4])
@pytest.mark.parametrize("options", [{}, {"size": 3}], ids=["plain", "options"])
def test_vllms_names_are_taken_for_what_they_are(
    prefix_caching: bool, cache_gb: float, options: dict[str, Any], algorithm: str
) -> None:
    described = config(prefix_caching, cache_gb)
    [name] = vllm_names(described, None, options, algorithm)
    names = InputNames.of(described)
    request = make_request(PROMPT, mm_features=[image(name, IMAGE_AT, 3)])
    is_counted = not prefix_caching and cache_gb == 0
    assert names.of_run is is_counted
    assert names.first_of_run(request) == (IMAGE_AT if is_counted else None)
    assert bool(DIGEST.fullmatch(name)) is not is_counted


def test_a_clients_name_holds_for_the_run_unless_it_is_a_digest() -> None:
    described = config(True, 4)
    for uuid, expected in (("cat", IMAGE_AT), (CAT, None), (CAT[:32], IMAGE_AT), (CAT + "0", IMAGE_AT)):
        [name] = vllm_names(described, uuid, {}, "blake3")
        assert name == uuid
        request = make_request(PROMPT, mm_features=[image(name, IMAGE_AT, 3)])
        assert InputNames.of(described).first_of_run(request) == expected, uuid


WITH_OPTIONS = [
    pytest.param({"size": 3}, {}, id="processor"),
    pytest.param({}, {"image": {"rgba_background_color": [1, 2, 3]}}, id="media"),
]


@pytest.mark.parametrize("uuid", ["cat", CAT])
@pytest.mark.parametrize(("options", "media"), WITH_OPTIONS)
def test_a_clients_name_that_vllm_hashes_with_options_holds_for_the_run(
    options: dict[str, Any], media: dict[str, Any], uuid: str
) -> None:
    described = config(True, 4)
    names = InputNames.of(described)
    [name] = vllm_names(described, uuid, options, "blake3", media)
    assert names.first_of_run(make_request(PROMPT, mm_features=[image(name, IMAGE_AT, 3)])) == IMAGE_AT
    [other] = vllm_names(described, "dog", options, "blake3", media)
    assert name != other
    [content] = vllm_names(described, None, options, "blake3", media)
    assert names.first_of_run(make_request(PROMPT, mm_features=[image(content, IMAGE_AT, 3)])) is None


@pytest.mark.parametrize(("options", "media"), WITH_OPTIONS)
def test_control_without_the_plugin_such_a_hash_passes_for_content(
    options: dict[str, Any], media: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", PLAIN)
    [name] = vllm_names(config(True, 4), "cat", options, "blake3", media)
    assert DIGEST.fullmatch(name)
    assert InputNames().first_of_run(make_request(PROMPT, mm_features=[image(name, IMAGE_AT, 3)])) is None


@pytest.mark.parametrize("with_bytes", [False, True])
def test_an_image_that_carries_a_uuid_holds_for_the_run(with_bytes: bool) -> None:
    def name(image_id: object, shade: int) -> str:
        picture: Any = Image.new("RGB", (4, 4), (shade, 2, 3))
        if image_id is not None:
            picture.getexif()[ExifTags.Base.ImageID] = image_id
        picture = MediaWithBytes(picture, bytes([shade])) if with_bytes else picture
        return MultiModalHasher.hash_kwargs("blake3", model_id="m", image=picture)

    client = UUID(int=1)
    assert name(client, 1) == name(client, 2), "vLLM hashes the UUID alone"
    assert name(client, 1).startswith(PREFIX)
    for image_id in (None, str(client)):
        assert name(image_id, 1) != name(image_id, 2)
        assert DIGEST.fullmatch(name(image_id, 1))


def test_a_marked_name_that_a_model_hashes_again_stays_marked() -> None:
    """If a model hashes a marked name again, the new name keeps the mark. Qwen3-VL does this for videos with options of
    their own.
    """
    again = MultiModalHasher.hash_kwargs("blake3", mm_hash=f"{PREFIX}{CAT}", fps=2)
    assert again.startswith(PREFIX)
    assert DIGEST.fullmatch(MultiModalHasher.hash_kwargs("blake3", mm_hash=CAT, fps=2))


@pytest.mark.parametrize("multimodal", [True, False])
def test_inputs_serve_their_run_alone_where_nothing_marks_clients_names(
    multimodal: bool, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", PLAIN)
    assert InputNames.of(config(True, 4, multimodal)).of_run is multimodal
    assert ("VLLM_PLUGINS" in logged.text) is multimodal


def test_a_hasher_of_another_kind_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hasher, "MultiModalHasher", object)
    register()
    assert "hashes inputs elsewhere" in logged.text
    assert not marks_names(hasher)
    assert InputNames.of(config(True, 4)).of_run


def test_an_adapters_name_before_the_digest_changes_nothing() -> None:
    feature = image(f"adapter:{CAT}", IMAGE_AT, 3)
    feature.mm_hash = CAT
    assert InputNames().first_of_run(make_request(PROMPT, mm_features=[feature])) is None


@pytest.mark.parametrize(
    ("dtype", "scales", "expected"), [("fp8", None, True), ("fp8", "/s.json", False), (None, None, False)]
)
def test_an_encoder_that_takes_its_scales_from_images_serves_its_own_run(
    dtype: str | None, scales: str | None, expected: bool, logged: pytest.LogCaptureFixture
) -> None:
    described = config(True, 4)
    described.model_config.multimodal_config.mm_encoder_attn_dtype = dtype
    described.model_config.multimodal_config.mm_encoder_fp8_scale_path = scales
    assert InputNames.of(described).of_run is expected
    assert ("mm_encoder_fp8_scale_path" in logged.text) is expected


# --- messages ---


def test_the_start_names_both_flags_once(logged: pytest.LogCaptureFixture) -> None:
    names = InputNames.of(config(False, 0))
    for number in range(3):
        names.first_of_run(make_request(PROMPT, f"{number}", mm_features=[image(COUNTED, 1, 2)]))
    [record] = logged.records
    assert "--no-enable-prefix-caching" in record.getMessage()
    assert "--mm-processor-cache-gb 0" in record.getMessage()


def test_a_clients_name_is_said_once(logged: pytest.LogCaptureFixture) -> None:
    names = InputNames.of(config(True, 4))
    for name in ("cat", "dog"):
        names.first_of_run(make_request(PROMPT, mm_features=[image(name, 1, 2)]))
    [record] = logged.records
    assert "'cat'" in record.getMessage()


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "multimodal"), [(True, 0, True), (False, 4, True), (False, 0, False)]
)
def test_control_nothing_is_said_where_names_are_digests(
    logged: pytest.LogCaptureFixture, prefix_caching: bool, cache_gb: float, multimodal: bool
) -> None:
    names = InputNames.of(config(prefix_caching, cache_gb, multimodal))
    names.first_of_run(make_request(PROMPT, mm_features=[image(CAT, 1, 2)]))
    assert not logged.records
    assert not names.of_run
