"""Direct calls of the linker with SGLang's own transfers and wrapper. The cases cannot be produced in a running
engine.
"""

from __future__ import annotations

from tests.engines_sglang.conftest import Parts

CURRENT_STREAM = 5


def test_a_queued_load_that_is_cancelled_is_not_begun(parts: Parts) -> None:
    assert parts["linker_child"]["cancelled"] == {
        "left": ["stays"],
        "leased": 0,
        "again": False,
        "after its start": False,
        "landed": True,
        "loaded": True,
        "untouched": True,
        "batch of none": -1,
        "control": True,
    }


def test_loads_and_offloads_are_never_refused(parts: Parts) -> None:
    found = parts["linker_child"]["never refused"]
    assert found["stored"] == [[True, True]] * 2
    assert found["full"] == [True, False], "taken, and not stored"
    assert (found["taken"], found["landed"]) == (True, False)


def test_a_flush_ends_what_is_queued_and_keeps_what_is_stored(parts: Parts) -> None:
    assert parts["linker_child"]["reset"] == {
        "completed": 0,
        "batch": -1,
        "leased": 0,
        "still stored": [1, 2],
    }


def test_pages_stored_between_new_weights_and_the_flush_are_forgotten(parts: Parts) -> None:
    """flexkv forgets pages that were stored between an update of the weights and the flush. SGLang can update weights
    while requests run, or without emptying its tree, and flush the tree later. Until the flush, it stores KV that was
    computed in part with the former weights.
    """
    assert parts["linker_child"]["new weights"] == {
        "before": [],
        "between": [1],
        "between, after the flush": [],
        "after": [1],
    }
    assert parts["linker_child"]["control: new weights"]["between, after the flush"] == [1]


def test_weights_that_are_written_without_a_call_empty_the_cache(parts: Parts) -> None:
    found = {"begin_weight_update": [[1], []], "end_weight_update": [[1], []]}
    assert parts["linker_child"]["written by RDMA"] == found


def test_memory_is_released_after_the_copies_have_ended(parts: Parts) -> None:
    """The pool's memory is released only after all copies have ended. SGLang's own code releases it without asking its
    caches whether copies are in flight. flexkv's hook in that code waits for the copies.
    """
    released = {"moving": [0], "unregistered before releases": [0], "stored": [1]}
    assert parts["linker_child"]["released"] == released
    assert parts["linker_child"]["released without the hook"]["moving"] == [1]
    assert parts["linker_child"]["released without the hook"]["unregistered before releases"] == []
    hangs = parts["linker_child"]["released under a copy that hangs"]
    assert hangs["moving"] == []
    assert "must not be released" in hangs["refused"]


def test_a_refused_linker_holds_no_folder(parts: Parts) -> None:
    found = parts["linker_child"]["refused late"]
    assert found["refused"] == "no such hook"
    assert found["works"] == [True, True], "the folder is free for another"
    assert "in use" in found["control"], "and is not while one has it"


def test_copies_come_after_the_stream_that_writes_the_pool(parts: Parts) -> None:
    """Copies wait for the stream that writes the pool. The test uses stand-ins for streams, whose work runs only when a
    caller waits for them. Copies run as early as their fences allow.
    """
    for case in ("fenced", "fenced with one stream"):
        assert parts["linker_child"][case] == {
            "landed": True,
            "stored what was written": True,
            "read before the load": True,
            "layers wait on": [CURRENT_STREAM],
        }, case
    control = parts["linker_child"]["control without the fence"]
    assert not control["stored what was written"]
    assert not control["read before the load"]


def test_sglangs_page_hashes_keep_callers_apart(parts: Parts) -> None:
    """SGLang's page hashes differ between callers with different extra keys, salts or adapters, or several of these.
    Each caller first gets no hit on the pages of earlier callers, and then gets hits on its own pages.
    """
    served = parts["hash_child"]["served"]["pages"]
    assert len(served) == 10
    assert all(pages == [0, 2] for pages in served.values()), served


def test_our_chain_is_sglangs(parts: Parts) -> None:
    assert parts["hash_child"]["chain"]["same"]
