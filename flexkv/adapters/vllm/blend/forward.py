"""Runs a forward pass of one of vLLM's decoder models in which the later layers compute fewer rows (tokens of the
batch) than the first layers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from flexkv.adapters.vllm.blend.forward_rows import (
    CachedRows,
    CachedRowsError,
    OwnWork,
    Planes,
    ReusedRows,
    RowLayers,
    RowsLost,
    TakenRows,
)
from flexkv.adapters.vllm.blend.rows import BatchRows, Numbers, Runs, kept_rows
from flexkv.blend.turned_rows import LostStretches
from flexkv.observe import get_logger

logger = get_logger(__name__)

ANOTHER_RANK = "another rank's log says what"


@dataclass(frozen=True, slots=True)
class LaterLayers:
    """The inputs of the layers after the check layer, and the rows that these layers compute.

    Attributes:
        context: vLLM's forward context for these layers.
        keep: for each row of the batch, whether these layers compute it, bool [rows].
        at: the numbers of the computed rows, on the model's device; None for all rows.
        skipped: the cached rows that stand in for rows that are not computed, with their slots; see
            `CachedRows.skipped`.
    """

    context: Any
    keep: NDArray[np.bool_]
    at: Any = None
    skipped: Sequence[tuple[RowLayers, Any]] = ()


Choose = Callable[[BatchRows, Sequence[tuple[Numbers, float]], NDArray[np.float64]], NDArray[np.bool_]]
"""A function with the arguments of `kept_rows` that chooses the rows that later layers compute."""


class BlendForward:
    """Runs blended forward passes of one model.

    Args:
        model: a vLLM model whose decoder is `model.model`. A decoder layer is called as `layer(positions,
            hidden_states, residual)`, and its attention is `layer.self_attn.attn`.
        check_layer: number of the layer whose fresh keys are compared with the cached ones. The check layer and the
            layers before it compute all rows.
        run_rows: how many adjacent rows are computed again together; see `rows_to_keep`.

    Attributes:
        layers, attentions: the model's layers, and the attention of each.
        check_layer: as in the arguments.
        choose: chooses the rows that the layers after the check layer compute (the kept rows).
        runs: divides the kept rows into sequences of adjacent rows.
    """

    def __init__(self, model: Any, vllm_config: Any, check_layer: int, run_rows: int = 1) -> None:
        self._decoder = model.model
        self._config = vllm_config
        self.layers = list(self._decoder.layers)
        self.attentions = [layer.self_attn.attn for layer in self.layers]
        self._names = [attention.layer_name for attention in self.attentions]
        self.check_layer = check_layer
        self._builder: Any = None
        self.choose: Choose = functools.partial(kept_rows, run_rows=run_rows)
        self.runs: Callable[[BatchRows, Numbers], Runs] = Runs.of

    def batch(self, positions: Any) -> BatchRows | None:
        """Returns the rows of the current forward pass; None if the engine does not describe them as one batch."""
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict) or not isinstance(context.slot_mapping, dict):
            return None
        starts = context.attn_metadata[self._names[0]].query_start_loc.cpu().numpy().astype(np.int64)
        rows = int(starts[-1])
        return BatchRows(
            starts,
            context.slot_mapping[self._names[0]][:rows].cpu().numpy().astype(np.int64),
            positions[:rows].cpu().numpy().astype(np.int64),
        )

    def run(
        self,
        input_ids: Any,
        positions: Any,
        batch: BatchRows,
        reused: Sequence[ReusedRows],
        taken: Sequence[TakenRows] = (),
    ) -> tuple[Any, NDArray[np.bool_]]:
        """Computes the forward pass of a batch. All ranks must call this with the same rows.

        Args:
            reused: the rows for which there are cached rows.
            taken: the rows whose fresh keys and values are passed to callbacks.

        Returns:
            The model's hidden states, [rows of `input_ids`, hidden size], with zeros in rows that not all layers have
            computed; and for each row of the batch, whether all layers have computed it.

        Raises:
            RowsLost: cached rows were lost on some rank. The slots of the batch's rows then have undefined content; the
                same call without the lost rows writes all these slots again.
            CachedRowsError: flexkv's work has failed on some rank, and the step cannot continue.
        """
        positions = positions[: batch.rows]
        hidden: Any = self._decoder.embed_input_ids(input_ids[: batch.rows])
        residual: Any = None
        watched = range(len(self.layers)) if taken else [self.check_layer] if reused else []
        cached, takers = CachedRows(reused), [(each, OwnWork()) for each in taken]
        try:
            cached.open(self.check_layer)  # earlier layers need no cached rows
            with self._fresh(watched) as fresh:
                for layer in range(self.check_layer + 1):
                    fresh.clear()
                    hidden, residual = self.layers[layer](positions, hidden, residual)
                    self._pass_on(layer, fresh, takers, None)
                later = LaterLayers(get_forward_context(), np.ones(batch.rows, np.bool_))
                if reused:
                    keep = self._keep(batch, reused, cached, fresh[self.check_layer][0])
                    later = later if keep.all() else self._later_layers(batch, cached, keep, later)
                if (at := later.at) is not None:
                    hidden, residual, positions = hidden[at], residual[at], positions[at]
                keep, kept = later.keep, np.flatnonzero(later.keep)
                puts = OwnWork(stops=get_tp_group().world_size == 1)
                with override_forward_context(later.context):
                    for layer in range(self.check_layer + 1, len(self.layers)):
                        fresh.clear()
                        for rows, at_slots in later.skipped:
                            puts.do(self._put, layer, rows, at_slots)
                        hidden, residual = self.layers[layer](positions, hidden, residual)
                        self._pass_on(layer, fresh, takers, kept)
        except BaseException as error:
            if (still_moves := cached.close()) is not None:
                raise still_moves from error
            if isinstance(
                error, LostStretches
            ):  # raised by `puts`, which raises at once if there is only one rank
                raise RowsLost(str(error)) from error
            raise
        still_moves = cached.close()
        needed = [work.failure for each, work in takers if each.lose is None]
        _raise_alike(puts.failure, [*needed, still_moves], hidden.device)
        for each, work in takers:
            if work.failure is not None and each.lose is not None:
                each.lose(work.failure)
        hidden, _ = self._decoder.norm(hidden, residual)
        if len(kept) == len(input_ids):
            return hidden, keep
        full = hidden.new_zeros((len(input_ids), hidden.shape[1]))
        full[torch.from_numpy(kept).to(hidden.device)] = hidden
        return full, keep

    # --- which rows ---

    def _keep(
        self, batch: BatchRows, reused: Sequence[ReusedRows], cached: CachedRows, fresh: Any
    ) -> NDArray[np.bool_]:
        """Returns which rows later layers compute, equal on every rank. If loading cached rows has failed on some rank,
        later layers compute all rows. This is possible because so far every layer has computed all rows.

        Raises:
            CachedRowsError: some rank's cached rows failed, and are still being copied at the deadline.
            RowsLost: some rank's cached rows are lost, and nothing else has failed.
        """
        # The last three elements of `difference` are flags: rows are lost, something else has failed, copies are still
        # in flight. A rank that fails must take part in the reduction too, because the other ranks wait for it.
        difference = torch.zeros(batch.rows + 3, dtype=torch.float32, device=fresh.device)
        cached.compare(self.check_layer, fresh, difference)
        failure = cached.failure
        if failure is not None:
            moves = cached.close() is not None
            is_lost = isinstance(failure, LostStretches)
            difference.zero_()
            difference[-3:] = torch.tensor([is_lost, not is_lost, moves], dtype=torch.float32)
        group = get_tp_group()
        if group.world_size > 1:
            difference = group.all_reduce(difference)  # each rank has some of the heads
        measured = difference.cpu().numpy().astype(np.float64)
        if measured[-1] > 0:
            raise CachedRowsError(
                f"cached rows failed and still move: {ANOTHER_RANK if failure is None else failure}"
            ) from failure
        if measured[-2] > 0:
            logger.warning("all rows of a step are computed: %s", failure or ANOTHER_RANK)
            return np.ones(batch.rows, np.bool_)
        if measured[-3] > 0:
            raise RowsLost(str(failure or ANOTHER_RANK)) from failure
        keep, choice = np.ones(batch.rows, np.bool_), OwnWork()
        choice.do(self._choose_to, keep, batch, reused, measured[: batch.rows])
        if choice.failure is not None:
            logger.warning("this rank cannot choose rows of a step", exc_info=choice.failure)
        if group.world_size > 1:
            # The last bits of the sums may differ between ranks, but the chosen rows must not.
            ours = torch.from_numpy(keep.astype(np.float32)).to(fresh.device)
            keep = group.broadcast(ours, src=0).cpu().numpy().astype(np.bool_)
        return keep

    def _choose_to(
        self,
        keep: NDArray[np.bool_],
        batch: BatchRows,
        reused: Sequence[ReusedRows],
        difference: NDArray[np.float64],
    ) -> None:
        keep[:] = self.choose(batch, [(each.rows, each.ratio) for each in reused], difference)

    def _later_layers(
        self, batch: BatchRows, cached: CachedRows, keep: NDArray[np.bool_], whole: LaterLayers
    ) -> LaterLayers:
        """Makes the inputs with which later layers compute only the kept rows. Waits for all ranks.

        Returns:
            The inputs. If some rank cannot make them, `whole`, with which later layers compute all rows; this is
            possible because so far every layer has computed all rows.
        """
        made: list[LaterLayers] = []
        work = OwnWork()
        work.do(lambda: made.append(self._make_later_layers(batch, cached, keep, whole.context)))
        if not _fails_anywhere(work.failure, whole.context.slot_mapping[self._names[0]].device):
            return made[0]
        logger.warning("all rows of a step are computed: %s", work.failure or ANOTHER_RANK)
        return whole

    def _make_later_layers(
        self, batch: BatchRows, cached: CachedRows, keep: NDArray[np.bool_], context: Any
    ) -> LaterLayers:
        slots = context.slot_mapping[self._names[0]]
        kept = np.flatnonzero(keep)
        return LaterLayers(
            self._context(context, batch, kept),
            keep,
            torch.from_numpy(kept).to(slots.device),
            cached.skipped(keep, slots),
        )

    def _put(self, layer: int, cached: RowLayers, slots: Any) -> None:
        """Writes a layer's cached rows to the pool, through the attention backend, which determines the pool's
        layout."""
        attention = self.attentions[layer]
        keys, values = cached.take(layer)
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    # --- fresh keys and values ---

    @contextlib.contextmanager
    def _fresh(self, layers: Sequence[int]) -> Iterator[dict[int, Planes]]:
        """Context manager that yields a dict. When one of the given layers calls its attention, the layer's keys and
        values are added to the dict. The caller removes them before the next layer runs, because they keep the layer's
        complete projection in memory.
        """
        seen: dict[int, Planes] = {}

        def look(layer: int) -> Callable[[Any, tuple[Any, ...]], None]:
            def hook(attention: Any, arguments: tuple[Any, ...]) -> None:
                seen[layer] = arguments[1], arguments[2]

            return hook

        hooks = [self.attentions[layer].register_forward_pre_hook(look(layer)) for layer in layers]
        try:
            yield seen
        finally:
            for each in hooks:
                each.remove()

    def _pass_on(
        self,
        layer: int,
        fresh: dict[int, Planes],
        takers: Sequence[tuple[TakenRows, OwnWork]],
        kept: Numbers | None,
    ) -> None:
        """Passes a layer's fresh keys and values to the callbacks of `takers`.

        Args:
            kept: the numbers of the rows that the layer has computed; None for all rows.
        """
        for each, work in takers:
            work.do(self._pass_on_to, each, layer, fresh, kept)

    def _pass_on_to(
        self, taken: TakenRows, layer: int, fresh: dict[int, Planes], kept: Numbers | None
    ) -> None:
        attention = self.attentions[layer]
        at = taken.rows if kept is None else np.searchsorted(kept, taken.rows)
        rows = torch.from_numpy(at).to(fresh[layer][0].device)
        keys, values = (
            plane.view(len(plane), attention.num_kv_heads, attention.head_size)[rows]
            for plane in fresh[layer]
        )
        taken.take(layer, (keys, values))

    # --- attention of fewer rows ---

    def _context(self, context: Any, batch: BatchRows, kept: Numbers) -> Any:
        """Returns a forward context that has only the kept rows. In this context, each run of kept rows is a
        sequence."""
        whole = context.attn_metadata[self._names[0]]
        all_slots = context.slot_mapping[self._names[0]]
        runs = self.runs(batch, kept)
        table = whole.block_table[torch.from_numpy(runs.sequences).to(all_slots.device)].contiguous()
        slots = all_slots[torch.from_numpy(kept).to(all_slots.device)].contiguous()
        metadata = self.metadata(runs, table, slots)
        return dataclasses.replace(
            context,
            attn_metadata=dict.fromkeys(context.attn_metadata, metadata),
            slot_mapping=dict.fromkeys(context.slot_mapping, slots),
        )

    def metadata(self, runs: Runs, table: Any, slots: Any) -> Any:
        """Returns the attention backend's metadata for a batch in which each run is a sequence.

        Args:
            table: the blocks of each run, [runs, blocks].
            slots: the slot of each row.
        """
        starts, lengths = torch.from_numpy(runs.starts), torch.from_numpy(runs.lengths)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(slots.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(slots.device),
            num_reqs=len(runs.lengths),
            num_actual_tokens=len(slots),
            max_query_len=int(np.diff(runs.starts).max()),
            max_seq_len=int(runs.lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
            seq_lens_cpu_upper_bound=lengths,
        )
        return self._metadata_builder(slots.device).build(0, common)

    def _metadata_builder(self, device: Any) -> Any:
        if self._builder is None:
            attention = self.attentions[0]
            spec = attention.get_kv_cache_spec(self._config)
            self._builder = attention.attn_backend.get_builder_cls()(spec, self._names, self._config, device)
        return self._builder


def _fails_anywhere(failure: Exception | None, device: Any) -> bool:
    """Whether flexkv's own work has failed on some rank. `failure` is the failure on this rank. Waits for all ranks."""
    group = get_tp_group()
    if group.world_size == 1:
        return failure is not None
    failed = torch.tensor([failure is not None], dtype=torch.float32, device=device)
    return float(group.all_reduce(failed)) > 0


def _raise_alike(puts: Exception | None, others: Sequence[Exception | None], device: Any) -> None:
    """Raises the same error on every rank if flexkv's own work has failed on some rank. Waits for all ranks.

    Args:
        puts: this rank's failure to write cached rows to the pool; None if it has not failed.
        others: this rank's failures in other parts of the work; each may be None.

    Raises:
        RowsLost: the work has failed only because cached rows were lost.
        CachedRowsError: the work has failed for another reason, and there are several ranks.
        Exception: the failure itself, if it has another reason and there is one rank.
    """
    lost = puts if isinstance(puts, LostStretches) else None
    other = next(filter(None, [None if lost else puts, *others]), None)
    group = get_tp_group()
    if group.world_size == 1:
        if other is not None:
            raise other
        some_lost, some_fail = lost is not None, False
    else:
        flags = torch.tensor([lost is not None, other is not None], dtype=torch.float32, device=device)
        some_lost, some_fail = (count > 0 for count in group.all_reduce(flags).cpu().tolist())
    if some_fail:
        reason = other or lost or ANOTHER_RANK
        raise CachedRowsError(f"flexkv's part of a step failed: {reason}") from (other or lost)
    if some_lost:
        raise RowsLost(str(lost or ANOTHER_RANK)) from lost
