"""What to try next: for each cause that costs a run much, the keys that act on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_LEAST = 0.02
"""Smallest loss, as a share of the peak, for which advice is given."""
_MOST = 5
_ADVICE = {
    "kernels": "products run below the peak: a larger train.microbatch or model.hidden fills the "
    "device better; train.precision=bf16 where it is fp32",
    "recompute": "a part of the work is done twice: train.recompute=selective or none if the "
    "memory allows it, or train.recompute_blocks for some blocks only",
    "bubble": "stages wait for each other: more microbatches (train.global_batch), another "
    "parallel.schedule (tools/schedule.py draws them), parallel.layers_per_stage where one stage "
    "works longer than the others, or fewer stages",
    "stragglers": "some ranks work longer than others of their stage: see the rows of the heat "
    "map; tools/doctor.py on their machine tells whether clocks or neighbours are to blame",
    "optimizer": "updates take long: parallel.zero=1 divides them over data ranks; a larger "
    "train.global_batch needs fewer of them; optim.offload=false if the memory allows it",
    "data": "steps wait for the loader: a larger data.prefetch, or token files on a local disk",
    "checkpoint": "saving delays steps: a larger checkpoint.every",
    "evaluation": "a larger train.eval_every or smaller train.eval_samples",
    "sampling": "a larger train.sample_every, or fewer train.sample_tokens or prompts",
    "other": "time that no part claims: the host may be slower than the device; "
    "metrics.trace=[STEP] shows where",
    "communication/tensor": "waits for tensor ranks: keep parallel.tensor within a node, make "
    "it smaller, or set parallel.tensor_chunks",
    "communication/context": "waits for context ranks: a smaller parallel.context",
    "communication/pipeline": "messages between stages are slow: put neighbours on a faster link",
    "communication/data": "waits for data ranks: a larger train.global_batch, parallel.zero=1 "
    "instead of 3, or parallel.data_replicate where some links are slow",
    "communication/islands": "waits for other islands: a larger sync.delay or sync.every, "
    "sync.compress=int4, or more sync.fragments",
    "communication/expert": "waits for experts: a parallel.dispatch that suits the links, "
    "parallel.expert_overlap=true with a pipeline, or a smaller parallel.expert",
}


def suggest_remedies(losses: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield causes and advice, the largest loss first.

    Args:
        losses: Shares of the peak by cause.
    """
    causes = sorted(losses, key=lambda cause: -losses[cause])
    num_suggested = 0
    for cause in causes:
        remedies = _ADVICE.get(cause) or _ADVICE.get(_find_first_axis(cause))
        if cause in ("mfu", "compute") or losses[cause] < _LEAST or remedies is None:
            continue
        num_suggested += 1
        if num_suggested > _MOST:
            return
        yield cause, remedies


def _find_first_axis(cause: str) -> str:
    """Map communication over several axes to the first axis that has advice, if any has."""
    names = cause.removeprefix("communication/").split("+")
    axes = (f"communication/{name.partition('_')[0]}" for name in names)
    return next((name for name in axes if name in _ADVICE), cause)
