"""The demo's script: one conversation cold, the same after the engine forgot it, then more than its pool holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo.engine_process import EngineProcess
from demo.model import ModelShape, prompt_tokens

FIRST_PROMPT_TOKENS = 1200
FOLLOW_UP_TOKENS = 150
ANSWER_TOKENS = 24
TURNS = 4
CROWD = 8
CROWD_PROMPT_TOKENS = 800
CROWD_TURNS = 2

SERVED_TOKENS = "vllm:external_prefix_cache_hits_total"
LOADED_BYTES = "vllm:flexkv_moved_bytes_total{direction=load}"
STORED_BYTES = "vllm:flexkv_moved_bytes_total{direction=store}"
LOAD_SECONDS = "vllm:flexkv_transfer_seconds_sum{direction=load}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and what its answer took.

    Attributes:
        phase: cold, warm (the engine's own cache was dropped before) or crowd.
        served: prompt tokens that came from flexkv.
        expects_service: flexkv must have served some.
        load_seconds: from the submission of the loads until the engine saw them ended.
    """

    phase: str
    talk: int
    number: int
    prompt_tokens: int
    answer: tuple[int, ...]
    ttft_s: float
    served: int = 0
    loaded_bytes: float = 0.0
    stored_bytes: float = 0.0
    load_seconds: float = 0.0
    expects_service: bool = False

    @property
    def name(self) -> str:
        return f"{self.phase} {self.talk}.{self.number}"


@dataclass
class Script:
    """Plays the script on two engines in turns, so that other load on the machine meets both alike.

    Both get the same prompts: the answers that make up the next one are those of the engine without flexkv.
    """

    engine: EngineProcess
    alone: EngineProcess
    shape: ModelShape
    advance: Callable[[str], None]
    """Called before each turn with its name."""
    turns: list[Turn] = field(default_factory=list)
    reference: list[Turn] = field(default_factory=list)

    def play(self) -> None:
        """Fills `turns` (with flexkv) and `reference` (without), in the same order."""
        self._warm_up()
        prompts = self._talk("cold", 0)
        self._forget()
        for number, prompt in enumerate(prompts):
            # Each turn is asked for anew after the engine forgot, as when other users came in between.
            self._turn("warm", 0, number, prompt, expects_service=True)
            self._forget()
        self._crowd()

    def _forget(self) -> None:
        for engine in (self.engine, self.alone):
            engine.call("drain")
            engine.call("reset")

    def _warm_up(self) -> None:
        """The first requests of a process are slow for reasons of their own: allocators, thread pools."""
        for engine in (self.engine, self.alone):
            engine.generate([{"ids": self._tokens(FIRST_PROMPT_TOKENS, 99), "max_tokens": 2}])
            engine.call("drain")

    def _talk(self, phase: str, talk: int) -> list[list[int]]:
        prompts, prompt = [], self._tokens(FIRST_PROMPT_TOKENS, talk)
        for number in range(TURNS):
            prompts.append(prompt)
            answer = self._turn(phase, talk, number, prompt)
            prompt = [*prompt, *answer, *self._tokens(FOLLOW_UP_TOKENS, 1000 + number)]
        return prompts

    def _crowd(self) -> None:
        """Conversations in rotation that together exceed the engine's pool: each turn finds its start evicted."""
        prompts = {talk: self._tokens(CROWD_PROMPT_TOKENS, talk) for talk in range(1, CROWD + 1)}
        for number in range(CROWD_TURNS):
            for talk, prompt in prompts.items():
                answer = self._turn("crowd", talk, number, prompt, expects_service=number > 0)
                prompts[talk] = [*prompt, *answer, *self._tokens(FOLLOW_UP_TOKENS, 2000 + 10 * talk + number)]

    def _turn(
        self, phase: str, talk: int, number: int, prompt: list[int], expects_service: bool = False
    ) -> list[int]:
        self.advance(f"{phase} {talk}.{number}")
        request = {"ids": prompt, "max_tokens": ANSWER_TOKENS}
        [plain] = self.alone.generate([request])
        before = self.engine.metrics()
        [result] = self.engine.generate([request])
        # Stores outlive their request by a moment; their bytes belong to this turn.
        self.engine.call("drain")
        after = self.engine.metrics()

        def grown(series: str) -> float:
            return after.get(series, 0.0) - before.get(series, 0.0)

        answer: list[int] = plain["tokens"]
        self.reference.append(Turn(phase, talk, number, len(prompt), tuple(answer), plain["ttft_s"]))
        self.turns.append(
            Turn(
                phase,
                talk,
                number,
                len(prompt),
                tuple(result["tokens"]),
                result["ttft_s"],
                served=int(grown(SERVED_TOKENS)),
                loaded_bytes=grown(LOADED_BYTES),
                stored_bytes=grown(STORED_BYTES),
                load_seconds=grown(LOAD_SECONDS),
                expects_service=expects_service,
            )
        )
        return answer

    def _tokens(self, count: int, stream: int) -> list[int]:
        return prompt_tokens(count, stream, self.shape)


def turn_count() -> int:
    """How many turns the script has, for a progress bar."""
    return 2 * TURNS + CROWD * CROWD_TURNS


def problems(turns: list[Turn], reference: list[Turn]) -> Iterator[str]:
    """What is wrong with a run, in words; nothing if flexkv served and every answer is the reference's."""
    if len(turns) != len(reference):
        yield f"{len(turns)} turns were played, {len(reference)} without flexkv"
    for mine, theirs in zip(turns, reference, strict=False):
        if mine.answer != theirs.answer:
            at = _first_difference(mine.answer, theirs.answer)
            yield f"turn {mine.name}: the answer differs from the run without flexkv at token {at}"
        if mine.expects_service and mine.served == 0:
            yield f"turn {mine.name}: flexkv served nothing of {mine.prompt_tokens} prompt tokens"
    if not any(turn.expects_service for turn in turns):
        yield "no turn expected flexkv to serve anything"


def _first_difference(mine: Iterable[int], theirs: Iterable[int]) -> int:
    pairs = zip(mine, theirs, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), -1)


def as_json(turn: Turn) -> dict[str, Any]:
    return {
        "phase": turn.phase,
        "conversation": turn.talk,
        "turn": turn.number,
        "prompt_tokens": turn.prompt_tokens,
        "tokens_from_flexkv": turn.served,
        "ttft_s": turn.ttft_s,
        "loaded_bytes": turn.loaded_bytes,
        "stored_bytes": turn.stored_bytes,
        "load_seconds": turn.load_seconds,
        "answer": list(turn.answer),
    }
