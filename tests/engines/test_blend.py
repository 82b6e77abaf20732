"""Blending inside unpatched vLLM: which rows are computed and which are reused. No other request gets KV of a blended
request."""

from __future__ import annotations

import pytest

from .blend_world import Documents, blending, new_results, results, salt, start_blending, steps_of
from .conftest import Engines
from .session import BLOCK_TOKENS, Answer, EngineSession, Prompt

ROUNDING = 1e-4
LOST = "vllm:flexkv_blend_lost_segments_total"
COMPUTED = "vllm:flexkv_blend_rows_total{kind=computed}"
STORED = "vllm:flexkv_moved_pages_total{direction=store}"


@pytest.fixture
def session(engines: Engines) -> EngineSession:
    return start_blending(engines)


@pytest.fixture
def documents(session: EngineSession, stream: int) -> Documents:
    made = Documents.of(stream % 10_000_000)
    made.store(session)
    return made


@pytest.mark.parametrize("chunk", [0, 256, 33, 1])
def test_a_ratio_of_one_is_the_full_computation_bit_for_bit(
    session: EngineSession, documents: Documents, chunk: int
) -> None:
    before = results(session)
    with steps_of(session, chunk):
        [full] = session.ask(documents.plain())
        [blended] = session.ask(documents.blended(1.0))
    assert (blended.tokens, blended.log_probabilities) == (full.tokens, full.log_probabilities)
    assert blended.tokens == session.reference.tokens(documents.prompt)
    assert new_results(session, before) == {"blended": 1}


def test_without_a_plan_the_engine_computes_as_one_without_blending_bit_for_bit(
    session: EngineSession, documents: Documents
) -> None:
    """If a request is not blended, its result is bit for bit that of an engine without blending. The control is
    `test_some_rows_are_reused_and_the_others_computed`, in which reused rows change the log probabilities.
    """
    [plain] = session.ask(documents.plain())
    assert plain.tokens == session.reference.tokens(documents.prompt)
    assert plain.log_probabilities == session.reference.log_probabilities(documents.prompt)


def test_some_rows_are_reused_and_the_others_computed(session: EngineSession, documents: Documents) -> None:
    rows = [f"vllm:flexkv_blend_rows_total{{kind={kind}}}" for kind in ("reused", "computed")]
    [full] = session.ask(documents.plain())
    before = [session.metric(name) for name in rows]
    [some] = session.ask(documents.blended(0.15))
    reused, computed = (session.metric(name) - had for name, had in zip(rows, before, strict=True))
    covered = sum(end - first for first, end in documents.spans)
    assert (reused, computed) == (covered - computed, round(0.15 * covered))
    assert some.log_probabilities != full.log_probabilities, "nothing was reused"


@pytest.mark.parametrize(("size", "chunk"), [(75, 512), (75, 33), (128, 50)])
def test_a_segment_has_the_keys_and_values_that_were_computed(
    session: EngineSession, stream: int, size: int, chunk: int
) -> None:
    """A stored segment has the keys and values that the engine computed. Compares every layer and row with a full
    computation. The engine computes the segment in chunks of different sizes.
    """

    def apart(number: int, wrong: str = "") -> dict[str, float]:
        ids = Prompt.of(size, stream % 10_000_000 + number).ids
        full = Prompt(ids, max_tokens=1, salt=f"full-{number}-{stream}-{chunk}")
        store = Prompt(ids, max_tokens=1, salt=salt(), extra=blending({"store": True}))
        return session.call("blend_captured", full=full.wire(), store=store.wire(), chunk=chunk, wrong=wrong)

    found = apart(0)
    assert max(found.values()) < ROUNDING
    wrong = {name: apart(number, name) for number, name in enumerate(("values", "another layer"), 1)}
    assert wrong["values"]["keys"] > 0.1
    assert min(wrong["another layer"].values()) > 0.1
    if chunk < size:
        assert min(apart(3, "row before").values()) > 0.1


def test_cached_keys_are_turned_to_where_they_stand(session: EngineSession, documents: Documents) -> None:
    turned = session.call("blend_differences", request=documents.blended(0.15).wire())["sum"]
    control = session.call("blend_differences", request=documents.blended(0.15).wire(), turned=False)["sum"]
    assert 0 < turned < control / 2


@pytest.mark.parametrize("chunk", [0, 100])
def test_kept_rows_get_the_keys_of_the_full_computation(
    session: EngineSession, documents: Documents, chunk: int
) -> None:
    """Kept rows, which a blend computes anew, get the keys of the full computation if the cached rows come from this
    computation.
    """
    with steps_of(session, chunk):
        found, control = (
            session.call(
                "blend_oracle",
                full=documents.plain().wire(),
                blended=documents.blended(0.15).wire(),
                share=0.2,
                one_sequence=broken,
            )
            for broken in (False, True)
        )
        [full] = session.ask(documents.plain())
    assert found["runs"] > 30, "the kept rows are apart"
    assert found["worst"] < ROUNDING
    for ours, theirs in zip(found["answer"]["logprobs"], full.log_probabilities, strict=True):
        assert abs(ours - theirs) < ROUNDING
    assert control["worst"] > 0.1, "the kept rows as one causal sequence: they see rows behind them"


@pytest.mark.parametrize("check_layer", [0, 2])
def test_any_layer_but_the_last_may_be_the_check_layer(
    session: EngineSession, stream: int, check_layer: int
) -> None:
    """Any layer except the last one can be the check layer. Compares the keys of the kept rows with those of the full
    computation, and their attention with attention in plain torch. In the control, rows attend one position too far
    ahead, and the comparison fails.
    """
    documents = Documents.of(stream % 10_000_000)
    spans = [list(span) for span in documents.spans]
    session.call("blend_store_true", full=documents.plain().wire(), spans=spans)
    asks = {"full": documents.plain().wire(), "blended": documents.blended(0.15).wire()}
    found = session.call("blend_oracle", share=0.2, loaded=True, check_layer=check_layer, **asks)
    assert found["runs"] > 30
    assert found["worst"] < ROUNDING
    attended, control = (
        session.call(
            "blend_reference",
            request=documents.blended(0.15).wire(),
            seen_ahead=seen_ahead,
            check_layer=check_layer,
        )
        for seen_ahead in (0, 1)
    )
    assert attended["layers"] == 3 - check_layer
    assert attended["worst"] < ROUNDING
    assert control["worst"] > 100 * ROUNDING


@pytest.mark.parametrize("chunk", [0, 100])
def test_kept_rows_beside_loaded_rows_get_the_keys_of_the_full_computation(
    session: EngineSession, stream: int, chunk: int
) -> None:
    """Kept rows get the keys of the full computation even if the other rows come from segments through the load
    pipeline. In the control, the pipeline gives each layer after the check layer the rows of the layer before, and the
    keys differ.
    """
    documents = Documents.of(stream % 10_000_000)
    spans = [list(span) for span in documents.spans]
    session.call("blend_store_true", full=documents.plain().wire(), spans=spans)
    with steps_of(session, chunk):
        found, control = (
            session.call(
                "blend_oracle",
                full=documents.plain().wire(),
                blended=documents.blended(0.15).wire(),
                share=0.2,
                loaded=True,
                another_layer=broken,
            )
            for broken in (False, True)
        )
    assert found["runs"] > 30, "the kept rows are apart"
    assert found["worst"] < ROUNDING
    assert control["worst"] > 0.1


def test_kept_rows_attend_to_what_plain_torch_attends_to(
    session: EngineSession, documents: Documents
) -> None:
    found = session.call("blend_reference", request=documents.blended(0.15).wire())
    assert found["layers"] == 2
    assert found["kept"] > 60
    assert found["worst"] < ROUNDING
    control = session.call("blend_reference", request=documents.blended(0.15).wire(), seen_ahead=1)
    assert control["worst"] > 100 * ROUNDING


def test_earlier_rows_do_not_see_later_ones(session: EngineSession, documents: Documents) -> None:
    first, end = documents.spans[1]
    asks = {"request": documents.blended(0.15).wire(), "other": documents.blended(0.15).wire()}
    found = session.call("blend_poison", first=first, end=end, **asks)
    assert found["of_before"] > 10
    assert found["before"] == 0
    assert found["after"] > 10, "the control: later rows see the garbage"


def test_requests_of_one_batch_do_not_change_each_other(session: EngineSession, stream: int) -> None:
    """Requests of one batch do not change each other's answers. Two blended prompts are computed in chunks. They share
    steps with each other, with a request that decodes, and with chunks of ordinary prompts. The control puts cached
    rows one row too early, but only in shared steps.
    """
    several = [Documents.of(stream % 10_000_000 + 100 * number) for number in range(2)]
    for each in several:
        each.store(session)

    def ordinary(tokens: int, number: int, answer: int) -> Prompt:
        ids = Prompt.of(tokens, stream + number).ids
        return Prompt(ids, answer, f"plain-{salt()}", log_probabilities=True)

    def batch() -> list[Prompt]:
        """Returns blended prompts, and ordinary prompts that still run when the loads of the blended prompts have
        finished."""
        blended = [each.blended(0.15, max_tokens=8) for each in several]
        return [*blended, ordinary(40, 1, 60), *(ordinary(200, number, 1) for number in range(2, 12))]

    def apart(answers: list[Answer]) -> list[float]:
        return [
            max(abs(a - b) for a, b in zip(one.log_probabilities, two.log_probabilities, strict=True))
            for one, two in zip(answers, alone, strict=True)
        ]

    with steps_of(session, 120):
        session.call("blend_watch_steps")
        alone = [session.ask(prompt)[0] for prompt in batch()]
        assert all(len(step["rows"]) == 1 for step in session.call("blend_watched_steps")["steps"])
        session.call("blend_watch_steps")
        together = session.ask(*batch())
        steps = session.call("blend_watched_steps")["steps"]
        session.call("blend_watch_steps", misplaced=True)
        control = session.ask(*batch())
        session.call("blend_watched_steps")
    others = [[rows for at, rows in enumerate(step["rows"]) if at not in step["blended"]] for step in steps]
    assert any(1 in rows for rows in others), f"one decodes: {steps}"
    assert any(max(rows, default=0) > 1 for rows in others), f"an ordinary prompt's chunk: {steps}"
    assert any(len(step["blended"]) == 2 for step in steps), f"two blended chunks: {steps}"
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert max(apart(together)) < ROUNDING
    assert min(apart(control)[:2]) > 10 * ROUNDING
    assert max(apart(control)[2:]) < ROUNDING


def test_no_other_request_gets_anything_of_a_blended_one(
    session: EngineSession, documents: Documents
) -> None:
    session.settle()
    stored = session.metric(STORED)
    blended = documents.blended(0.0)
    session.ask(blended)
    ordinary = session.check_one(documents.plain(salt=""))
    assert ordinary.cached == 0
    # vLLM's own prefix cache must have no blocks of the blended prompt under this salt.
    again = session.check_one(documents.plain(salt=blended.salt))
    assert again.cached == 0
    session.forget()
    assert session.check_one(documents.plain(salt=blended.salt)).cached == 0
    session.forget()
    session.check_one(documents.plain(salt=""))
    assert session.metric(STORED) - stored > 0
    held = session.call("blend_held")
    assert held == {"live": 0, "pages": 0, "loads": 0, "staged": 0}


def test_a_blended_request_stores_no_page(session: EngineSession, documents: Documents) -> None:
    session.settle()
    stored = session.metric(STORED)
    session.ask(documents.blended(0.15, max_tokens=70))
    session.settle()
    assert session.metric(STORED) == stored
    plain = documents.plain(max_tokens=70)
    session.ask(plain)
    session.settle()
    assert session.metric(STORED) - stored > plain.whole_blocks // BLOCK_TOKENS, (
        "the control: an ordinary one stores its pages, also those of its answer"
    )


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_salt_serves_once(session: EngineSession, documents: Documents, forgotten: bool) -> None:
    before = results(session)
    once = salt()
    session.ask(documents.blended(0.0, salt=once))
    if forgotten:
        session.call("blend_forget_salts")
    assert session.check_one(documents.blended(0.0, salt=once)).cached == 0
    assert new_results(session, before) == {"blended": 1, "used_salt": 1} or forgotten


def test_control_without_a_salt_others_get_blended_rows(session: EngineSession, documents: Documents) -> None:
    [full] = session.ask(documents.plain())
    session.call("blend_trusting", requests=[documents.blended(0.0, salt="").wire()])
    [answer] = session.ask(documents.plain(salt=""))
    assert answer.cached > 0
    assert answer.log_probabilities != full.log_probabilities
    session.call("reset")


def test_a_damaged_segment_is_computed(session: EngineSession, documents: Documents) -> None:
    before = session.metric(LOST)
    count = results(session)
    session.call("blend_flip", pages=10_000)
    try:
        session.check_one(documents.blended(0.0))
    finally:
        session.call("blend_flip", pages=10_000)
    assert session.metric(LOST) - before == len(documents.spans)
    assert new_results(session, count) == {"lost": 1}


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_one_damaged_page_costs_its_own_segment(
    session: EngineSession, documents: Documents, damaged: int
) -> None:
    """If one page of a segment is damaged, only this segment is not reused. The answer is as if the request had not
    listed it. The control shows that the answer with all segments is different.
    """
    rows = "vllm:flexkv_blend_rows_total{kind=reused}"
    good = [span for at, span in enumerate(documents.spans) if at != damaged]
    [wanted] = session.ask(documents.blended(0.0, good))
    [whole] = session.ask(documents.blended(0.0))
    before, count, had = session.metric(LOST), results(session), session.metric(rows)
    first, end = documents.spans[damaged]
    session.call("blend_flip_page", segment=list(documents.prompt.ids[first:end]), page=2)
    [answer] = session.ask(documents.blended(0.0))
    assert session.metric(LOST) - before == 1
    assert new_results(session, count) == {"blended": 1}
    assert session.metric(rows) - had == sum(end - first for first, end in good)
    assert (answer.tokens, answer.log_probabilities) == (wanted.tokens, wanted.log_probabilities)
    assert answer.log_probabilities != whole.log_probabilities


def test_segments_between_separators_are_found(session: EngineSession, documents: Documents) -> None:
    [named] = session.ask(documents.blended(0.15))
    [found] = session.ask(documents.blended(salt=salt(), extra=blending(True)))
    assert found.log_probabilities == named.log_probabilities


def test_namespaces_share_no_segment(session: EngineSession, documents: Documents) -> None:
    before = results(session)
    ask = documents.blended(0.0)
    assert ask.extra is not None
    ask.extra["kv_transfer_params"]["flexkv.namespace"] = "another"
    session.check_one(ask)
    assert new_results(session, before) == {"miss": 1}


def test_a_request_that_ends_in_the_middle_leaves_nothing(
    session: EngineSession, documents: Documents, stream: int
) -> None:
    """A blended request that is aborted in the middle of its prompt holds no resources afterwards. It frees its blocks
    at once, and other requests get them in the middle of their prompts."""
    other, later = Prompt.of(300, stream, salt=salt()), Prompt.of(350, stream + 1, salt=salt())
    with steps_of(session, 64):
        reply = session.call(
            "abort",
            requests=[documents.blended(0.15).wire(), other.wire()],
            victim=0,
            status="RUNNING",
            later=[later.wire()],
        )
    assert reply["aborted"], reply
    assert not reply["requests"][0]["tokens"], "it ended in its prompt"
    for prompt, result in zip((other, later), reply["requests"][1:], strict=True):
        session.judge(prompt, Answer.of(result))
    session.settle()
    assert session.call("blend_held") == {"live": 0, "pages": 0, "loads": 0, "staged": 0}
    [again] = session.ask(documents.blended(1.0))
    assert again.tokens == session.reference.tokens(documents.prompt)


def test_blended_requests_that_are_preempted_get_their_full_answers(
    session: EngineSession, stream: int
) -> None:
    """Blended requests that are preempted get their full answers. Three blended prompts fill the engine's pool, and run
    out of blocks while they generate."""
    several = [
        Documents.of(stream % 10_000_000 + 100 * number, (600, 400, 250), max_tokens=120)
        for number in range(3)
    ]
    for each in several:
        each.store(session)
    preemptions = session.metric("vllm:num_preemptions_total")
    session.check(*(each.blended(1.0) for each in several))
    assert session.metric("vllm:num_preemptions_total") > preemptions
    session.settle()
    assert session.call("blend_held") == {"live": 0, "pages": 0, "loads": 0, "staged": 0}


def test_a_request_whose_blocks_were_taken_is_blended_with_the_same_rows_again(
    session: EngineSession, stream: int
) -> None:
    """A preempted request is blended again with the same rows. A reset preempts two blended requests while they
    generate, and drops the engine's prefix cache. Their answers do not change. The control shifts the cached rows by
    one after the reset.
    """
    names = [f"vllm:flexkv_blend_rows_total{{kind={kind}}}" for kind in ("reused", "computed", "unplaced")]
    several = [
        Documents.of(stream % 10_000_000 + 100 * number, max_tokens=40, log_probabilities=True)
        for number in range(2)
    ]
    for each in several:
        each.store(session)
    alone = [session.ask(each.blended(0.15))[0] for each in several]

    def preempted(rolled: bool) -> list[Answer]:
        asks = [each.blended(0.15).wire() for each in several]
        reply = session.call("blend_preempted", requests=asks, tokens=9, rolled=rolled)
        assert reply["done"]
        return [Answer.of(result) for result in reply["requests"]]

    count, had = session.metric("vllm:num_preemptions_total"), [session.metric(name) for name in names]
    before = results(session)
    found = preempted(rolled=False)
    assert session.metric("vllm:num_preemptions_total") - count == 2
    covered = sum(end - first for each in several for first, end in each.spans)
    reused, computed, unplaced = (session.metric(name) - had for name, had in zip(names, had, strict=True))
    assert (reused + computed, unplaced) == (2 * covered, 0), "each prompt is blended twice"
    assert computed == 2 * 2 * round(0.15 * covered / 2)
    assert new_results(session, before) == {"blended": 2}
    control = preempted(rolled=True)
    for one, wanted, wrong in zip(found, alone, control, strict=True):
        assert one.tokens == wanted.tokens
        assert one.log_probabilities == pytest.approx(wanted.log_probabilities, abs=ROUNDING)
        assert wrong.log_probabilities != pytest.approx(wanted.log_probabilities, abs=10 * ROUNDING)
    session.settle()
    assert session.call("blend_held") == {"live": 0, "pages": 0, "loads": 0, "staged": 0}


def test_a_reset_forgets_the_segments(session: EngineSession, documents: Documents) -> None:
    before = results(session)
    session.settle()
    assert session.call("reset", connector=True)["done"]
    session.check_one(documents.blended(0.0))
    assert new_results(session, before) == {"miss": 1}


def test_an_erased_namespace_takes_the_segments_with_it(session: EngineSession, documents: Documents) -> None:
    before = results(session)
    session.settle()
    session.ask(documents.blended(0.0))
    session.call("blend_erase", name="tenant")
    session.check_one(documents.blended(0.0))
    assert new_results(session, before) == {"blended": 1, "miss": 1}


def test_the_test_at_the_start_finds_what_the_next_token_would_not_show(session: EngineSession) -> None:
    session.forget()
    assert session.call("blend_selftest")["refusal"] == ""
    for broken in ("mask", "rows", "row"):
        refusal = session.call("blend_selftest", broken=broken)["refusal"]
        assert refusal.startswith("its test at the start fails: the oracle is off by"), broken
    refusal = session.call("blend_selftest", broken="builder")["refusal"]
    assert refusal.startswith("its test at the start fails: AttributeError: 'object' object has no attribute")
    session.forget()
