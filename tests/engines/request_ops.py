"""Operations that control running requests: they abort or reset requests at a chosen moment, add other requests, and
send kinds of requests that the harness cannot send.
"""

from __future__ import annotations

import time
from copy import copy
from typing import Any

from demo.engine_child import Operation, RequestTracker

from .worker_calls import call_workers


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def request_status(scheduler: Any, name: str) -> str:
    """Returns the scheduler's status of the request whose internal id starts with `name`; "GONE" if there is none."""
    for request_id, request in scheduler.requests.items():
        if request_id.startswith(name):
            return str(request.status.name)
    return "GONE"


def abort(
    llm: Any,
    requests: list[dict[str, Any]],
    victim: int,
    status: str = "",
    steps: int = 0,
    later: list[dict[str, Any]] | None = None,
    deadline_s: float = 30.0,
) -> dict[str, Any]:
    """Runs requests and aborts one of them. Then immediately adds the requests in `later`, and runs all requests to
    their end.

    Args:
        victim: index of the request to abort.
        status: the scheduler's status of the victim at which to abort it (WAITING_FOR_REMOTE_KVS, RUNNING, ...).
        steps: number of engine steps after which to abort the victim if `status` is empty.
    """
    scheduler, tracker = _scheduler(llm), RequestTracker(llm)
    names = [f"a{number}-{time.monotonic_ns()}" for number in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        tracker.add(name, request)
    taken, ends_at = 0, time.monotonic() + deadline_s
    seen: list[str] = []
    while True:
        now = request_status(scheduler, names[victim])
        if not seen or seen[-1] != now:
            seen.append(now)
        if (status and now == status) or (not status and taken >= steps):
            break
        if not tracker.step() or time.monotonic() > ends_at:
            return {"aborted": False, "statuses": seen, "requests": tracker.results()}
        taken += 1
    llm.llm_engine.abort_request([names[victim]])
    kept = request_status(scheduler, names[victim])
    for number, request in enumerate(later or []):
        tracker.add(f"l{number}-{time.monotonic_ns()}", request)
    while tracker.step():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"requests still unfinished {deadline_s:g} s after the abort")
    return {"aborted": True, "statuses": seen, "after_abort": kept, "requests": tracker.results()}


def _embed_anew(worker: Any) -> None:
    """Runs in each worker: replaces the embedding of every token, so that the KV of every layer changes."""
    weight = next(
        value for name, value in worker.model_runner.model.named_parameters() if "embed_tokens" in name
    )
    weight.data.copy_(weight.data.roll(1, 0))


def load_new_weights(llm: Any, hidden: bool = False) -> dict[str, Any]:
    """Changes the weights of a running engine, as training does between two rounds.

    Args:
        hidden: whether to change the weights without a call that flexkv sees.
    """
    if hidden:
        call_workers(llm, _embed_anew)
    else:
        llm.collective_rpc(_embed_anew)
    return {}


def reload_weights(llm: Any, folder: str) -> dict[str, Any]:
    """Loads other weights into a running engine, as `POST /collective_rpc` with `reload_weights` does."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    return {}


def reset_while_running(
    llm: Any,
    requests: list[dict[str, Any]],
    steps: int,
    connector: bool,
    running: bool,
    new_weights: bool = False,
    until_running: bool = False,
    deadline_s: float = 30.0,
) -> dict[str, Any]:
    """Runs requests, resets the prefix cache after `steps` engine steps, and runs the requests to their end.

    Args:
        connector: whether to reset the connector's cache too.
        running: whether vLLM may preempt running requests for the reset.
        new_weights: whether the engine gets new weights after the reset, without a call that flexkv sees.
        until_running: whether to count the steps only from the moment when all requests run, after their loads.
    """
    scheduler, ends_at = _scheduler(llm), time.monotonic() + deadline_s
    tracker = RequestTracker(llm)
    for number, request in enumerate(requests):
        tracker.add(f"w{number}-{time.monotonic_ns()}", request)
    while until_running and len(scheduler.running) < len(requests):
        if not tracker.step() or time.monotonic() > ends_at:
            raise TimeoutError(f"{len(scheduler.running)} of {len(requests)} requests run")
    for _ in range(steps):
        tracker.step()
    preempted = len(scheduler.running) if running else 0
    done = llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
    if new_weights:
        load_new_weights(llm, hidden=True)
    while tracker.step():
        pass
    return {"done": bool(done), "preempted": preempted, "requests": tracker.results()}


def new_weights_within_a_block(
    llm: Any, ids: list[int], tokens: int, deadline_s: float = 60.0
) -> dict[str, Any]:
    """The weights change while a request has less than one whole block. When it has generated more blocks, a second
    request continues its tokens and finds its blocks in the engine's own prefix cache.

    Args:
        ids: the first request's prompt.
        tokens: number of tokens of the second request's prompt.

    Returns:
        The second request's prompt, and the results of both requests.
    """
    tracker, ends_at = RequestTracker(llm), time.monotonic() + deadline_s
    name = f"f-{time.monotonic_ns()}"
    tracker.add(name, {"ids": ids, "max_tokens": 2 * tokens})

    def run_until(count: int) -> None:
        while len(tracker.results()[0]["tokens"]) < count:
            if not tracker.step() or time.monotonic() > ends_at:
                raise TimeoutError(f"{count} tokens were not generated")

    run_until(3)
    load_new_weights(llm)
    run_until(tokens)
    second = [*ids, *tracker.results()[0]["tokens"]][:tokens]
    tracker.add(f"s-{time.monotonic_ns()}", {"ids": second, "max_tokens": 4})
    while tracker.step():
        pass
    return {"prompt": second, "requests": tracker.results()}


def requests_held(llm: Any) -> dict[str, Any]:
    """Returns how many requests the scheduler still has. A request that is aborted during an async load stays there
    until the load is reported.
    """
    return {"held": len(_scheduler(llm).requests)}


def ask_embeddings(llm: Any, seeds: list[int], tokens: int, max_tokens: int) -> dict[str, Any]:
    """Sends prompts as embeddings, one after the other: one prompt of `tokens` random embeddings per seed."""
    import torch

    hidden = llm.llm_engine.model_config.get_hidden_size()
    results = []
    for seed in seeds:
        embeddings = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
        tracker = RequestTracker(llm)
        tracker.add(f"e{seed}-{time.monotonic_ns()}", {"ids": [], "max_tokens": max_tokens}, embeddings)
        while tracker.step():
            pass
        results += tracker.results()
    return {"requests": results}


def ask_with_lora(
    llm: Any, request: dict[str, Any], folder: str, number: int, in_place: bool = False
) -> dict[str, Any]:
    """Sends one prompt with a LoRA adapter, or without one if `folder` is empty.

    Args:
        number: the adapter's id.
        in_place: whether to load the adapter again even if an adapter with this id is loaded.
    """
    from vllm.lora.request import LoRARequest

    lora = (
        LoRARequest(lora_name=folder, lora_int_id=number, lora_path=folder, load_inplace=in_place)
        if folder
        else None
    )
    tracker = RequestTracker(llm)
    tracker.add(f"l{number}-{time.monotonic_ns()}", request, lora_request=lora)
    while tracker.step():
        pass
    return {"requests": tracker.results()}


def add_lora(llm: Any, folder: str, number: int, in_place: bool = False) -> dict[str, Any]:
    """Loads a LoRA adapter before any request uses it, as `--lora-modules` does."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(lora_name=folder, lora_int_id=number, lora_path=folder, load_inplace=in_place)
    return {"added": bool(llm.llm_engine.add_lora(request))}


def embed(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Returns a pooling model's embedding of one prompt, and how many of the prompt's tokens were not computed."""
    (output,) = llm.embed([{"prompt_token_ids": ids}], use_tqdm=False)
    return {"embedding": list(output.outputs.embedding), "cached": output.num_cached_tokens or 0}


def stream(llm: Any, pieces: list[dict[str, Any]], deadline_s: float = 30.0) -> dict[str, Any]:
    """Runs one streaming session: sends each piece of the prompt after the engine has finished with the previous
    piece."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, scheduler = llm.llm_engine, _scheduler(llm)
    name, ends_at = f"s-{time.monotonic_ns()}", time.monotonic() + deadline_s

    def add(piece: dict[str, Any], goes_on: bool) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=piece["max_tokens"],
            ignore_eos=True,
            extra_args=piece["extra"],
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": piece["ids"]}
        tasks = engine.get_supported_tasks()
        request = engine.input_processor.process_inputs(
            name, prompt, params, supported_tasks=tasks, resumable=goes_on
        )
        request.external_req_id = name
        engine.output_processor.add_request(request, None, None, 0)
        # The front end and the core each append to the request's list of tokens. In this test they run in one process
        # and would share the list, so the core gets a copy of the request.
        sent = copy(request)
        sent.prompt_token_ids = list(piece["ids"])
        engine.engine_core.add_request(sent)

    def run_until(status: str) -> None:
        while request_status(scheduler, name) != status:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the session is {request_status(scheduler, name)} and not {status}")
            engine.step()

    for piece in pieces:
        add(piece, goes_on=True)
        run_until("WAITING_FOR_STREAMING_REQ")
    tokens = list(scheduler.requests[name].all_token_ids)
    add(pieces[-1], goes_on=False)
    run_until("GONE")
    return {"tokens": tokens}


OPERATIONS: dict[str, Operation] = {
    "embed": embed,
    "abort": abort,
    "load_new_weights": load_new_weights,
    "reload_weights": reload_weights,
    "reset_while_running": reset_while_running,
    "new_weights_within_a_block": new_weights_within_a_block,
    "requests_held": requests_held,
    "stream": stream,
    "ask_embeddings": ask_embeddings,
    "ask_with_lora": ask_with_lora,
    "add_lora": add_lora,
}
