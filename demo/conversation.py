"""The demo's script, in four phases. It plays one new conversation, and plays it again after the engine dropped its
cache. Then it plays more conversations than the engine's pool can hold. Finally it plays the first conversation again
in a new engine process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo.engine_process import EngineProcess
from demo.model import ModelShape, prompt_tokens

BLOCK_TOKENS = 32
"""The smallest block that vLLM allows on a CPU."""
POOL_BLOCKS = 129
"""Number of blocks in the engine's own pool, including vLLM's null block. The pool is too small for the phase "crowd",
whose first prompts need 144 blocks.
"""

FIRST_PROMPT_TOKENS = 1024
FOLLOW_UP_TOKENS = 96
ANSWER_TOKENS = 16
TURNS = 3
CROWD = 8
CROWD_PROMPT_TOKENS = 576
CROWD_TURNS = 2
WARM_UP_TOKENS = 256

SERVED_TOKENS = "vllm:external_prefix_cache_hits_total"
LOADED_BYTES = "vllm:flexkv_moved_bytes_total{direction=load}"
STORED_BYTES = "vllm:flexkv_moved_bytes_total{direction=store}"
LOAD_SECONDS = "vllm:flexkv_transfer_seconds_sum{direction=load}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, its answer, and the measurements.

    Attributes:
        phase: "cold" (nothing is cached), "warm" (the engine dropped its own cache before), "crowd" (more conversations
            than the engine's pool holds), or "disk" (a new process answers).
        served: number of prompt tokens that came from flexkv.
        expects: minimum number of prompt tokens that flexkv must serve. If it serves fewer, the run has failed.
        load_seconds: seconds from the submission of the loads until the engine got their results.
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
    expects: int = 0

    @property
    def name(self) -> str:
        return f"{self.phase} {self.talk}.{self.number}"


@dataclass
class Script:
    """Plays the script on two engines in turns, so that other load on the machine affects both engines alike.

    Both engines get the same prompts. The prompt of a later turn contains the answers that the engine without flexkv
    gave in earlier turns.
    """

    engine: EngineProcess
    """The engine with flexkv. The phase "disk" replaces it."""
    alone: EngineProcess
    shape: ModelShape
    advance: Callable[[str], None]
    """Called before each turn, with the turn's name."""
    restart: Callable[[], EngineProcess]
    """Ends the engine with flexkv, and starts it again in a new process, which it returns."""
    turns: list[Turn] = field(default_factory=list)
    reference: list[Turn] = field(default_factory=list)
    _prompts: list[list[int]] = field(default_factory=list)

    def play(self) -> None:
        """Plays all phases, and adds their turns to `turns` (with flexkv) and `reference` (without), in the same
        order.
        """
        self._warm_up(self.engine, self.alone)
        for phase in PHASES:
            phase.play(self)

    def _forget(self) -> None:
        for engine in (self.engine, self.alone):
            engine.call("drain")
            engine.call("reset")

    def _warm_up(self, *engines: EngineProcess) -> None:
        """Runs one short request on each engine, because the first request of a process is slow until allocators
        and thread pools are set up.
        """
        for engine in engines:
            engine.generate([{"ids": self._tokens(WARM_UP_TOKENS, 99), "max_tokens": 2}])
            engine.call("drain")

    def cold(self) -> None:
        """Plays a conversation that is new to both engines."""
        prompt = self._tokens(FIRST_PROMPT_TOKENS, 0)
        for number in range(TURNS):
            self._prompts.append(prompt)
            answer = self._turn("cold", 0, number, prompt)
            prompt = [*prompt, *answer, *self._tokens(FOLLOW_UP_TOKENS, 1000 + number)]

    def warm(self) -> None:
        """Sends the prompts of the phase "cold" again. Before each prompt, the engines drop their own caches, as if
        prompts of other users had evicted everything.
        """
        for number, prompt in enumerate(self._prompts):
            self._forget()
            self._turn("warm", 0, number, prompt, expects=whole_blocks(len(prompt)))
        self._forget()

    def crowd(self) -> None:
        """Plays several conversations in rotation. All of them together are larger than the engine's pool. So when a
        conversation's second turn comes, the pool has evicted the start of its prompt.
        """
        prompts = {talk: self._tokens(CROWD_PROMPT_TOKENS, talk) for talk in range(1, CROWD + 1)}
        for number in range(CROWD_TURNS):
            for talk, prompt in prompts.items():
                answer = self._turn("crowd", talk, number, prompt, expects=BLOCK_TOKENS if number else 0)
                prompts[talk] = [*prompt, *answer, *self._tokens(FOLLOW_UP_TOKENS, 2000 + 10 * talk + number)]

    def disk(self) -> None:
        """Sends the first conversation's prompts again to a new engine process. This process can get their pages only
        from disk.
        """
        self.engine = self.restart()
        self._warm_up(self.engine)
        for number, prompt in enumerate(self._prompts):
            self._forget()
            self._turn("disk", 0, number, prompt, expects=whole_blocks(len(prompt)))

    def _turn(self, phase: str, talk: int, number: int, prompt: list[int], expects: int = 0) -> list[int]:
        self.advance(f"{phase} {talk}.{number}")
        request = {"ids": prompt, "max_tokens": ANSWER_TOKENS}
        [plain] = self.alone.generate([request])
        before = self.engine.metrics()
        [result] = self.engine.generate([request])
        # flexkv finishes storing a request's pages shortly after the request has ended. Their bytes count for the
        # request's turn, so the turn waits for them.
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
                expects=expects,
            )
        )
        return answer

    def _tokens(self, count: int, stream: int) -> list[int]:
        return prompt_tokens(count, stream, self.shape)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the script: its number of turns, and the method that plays them."""

    turns: int
    play: Callable[[Script], None]


PHASES = (
    Phase(TURNS, Script.cold),
    Phase(TURNS, Script.warm),
    Phase(CROWD * CROWD_TURNS, Script.crowd),
    Phase(TURNS, Script.disk),
)


def turn_count() -> int:
    """Returns the number of turns in the script."""
    return sum(phase.turns for phase in PHASES)


def whole_blocks(prompt_tokens: int) -> int:
    """Returns how many of a prompt's tokens can be served from complete blocks. The engine always computes the last
    token itself.
    """
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def problems(turns: list[Turn], reference: list[Turn]) -> Iterator[str]:
    """Yields a text for each problem of a run. Yields nothing if flexkv served the expected tokens, and every answer
    equals the reference.
    """
    if not len(turns) == len(reference) == turn_count():
        yield f"{len(turns)} turns were played, {len(reference)} without flexkv, of {turn_count()}"
    for mine, theirs in zip(turns, reference, strict=False):
        if mine.answer != theirs.answer:
            at = _first_difference(mine.answer, theirs.answer)
            yield f"turn {mine.name}: the answer differs from the run without flexkv at token {at}"
        if len(theirs.answer) != ANSWER_TOKENS:
            yield f"turn {mine.name}: the answer without flexkv has {len(theirs.answer)} tokens, not {ANSWER_TOKENS}"
        if mine.served < mine.expects:
            yield (
                f"turn {mine.name}: flexkv served {mine.served} of {mine.prompt_tokens} prompt tokens, "
                f"not {mine.expects} or more"
            )
    if not any(turn.expects for turn in turns):
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
