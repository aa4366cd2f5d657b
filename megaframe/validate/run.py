"""Checks of a config that no section can make alone, all made before anything is built.

Each rule yields a message with both numbers, the keys and the nearest valid values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megaframe.architecture.context import context_mistakes
from megaframe.architecture.experts import expert_mistakes
from megaframe.config.describe import format_value
from megaframe.config.schema import (
    BatchRampConfig,
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from megaframe.config.url import is_url, url_mistake
from megaframe.errors import TIMES, UserError, divisors, join_or, nearest_multiples
from megaframe.layout import Layout, axis_sizes
from megaframe.schedule import schedule_mistakes
from megaframe.validate.cuda_graph import graph_reasons
from megaframe.validate.model import model_mistakes
from megaframe.validate.nodes import crossing
from megaframe.validate.tensor_parallel import tensor_mistakes

TOKENIZERS = ("sentencepiece", "hf", "tiktoken")
_MOST_MICROBATCHES = 1 << 16
"""Microbatches of a step. A schedule lists every pass, and training has hundreds at most."""
NO_SOURCES = (
    "data.sources is empty; name token files, which tools/preprocess_data.py makes of text: "
    "data.sources=[{path: PATH}]"
)
_API_KEY = re.compile("[0-9a-f]{40}")


def check(config: RunConfig, world: int, *, data: bool = True) -> None:
    """Raise a `UserError` with all mistakes of a config that is to run on `world` ranks, if there
    are any. data: as in `mistakes`."""
    found = mistakes(config, world, data=data)
    if found:
        count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
        raise UserError("\n  ".join([f"{count} in the config", *found]))


def warnings(config: RunConfig, layout: Layout, node_size: int) -> list[str]:
    """Return warnings about settings that work, but probably not as intended.

    node_size: ranks per node.
    """
    found = (
        crossing(config, layout, node_size),
        _nothing_to_compare(config, layout),
        _still_rising(config.optim, config.train.steps),
    )
    return [f"warning: {warning}" for warning in found if warning is not None]


def mistakes(config: RunConfig, world: int, *, data: bool = True) -> list[str]:
    """Return the reasons why a config cannot run on `world` ranks; empty if it can.

    data: whether the config must name data sources; a dry run needs none.
    """
    sizes, layout = axis_sizes(config.parallel, world)
    return [
        *layout,
        *model_mistakes(config.model, config.train.seq),
        *tensor_mistakes(config),
        *expert_mistakes(config),
        *context_mistakes(config),
        *_further_ahead(config),
        *_vocabulary(config),
        *(_batches(config.train, sizes["data"]) if not layout else ()),
        *_stages(config),
        *(_schedule(config, sizes["data"]) if not layout else ()),
        *_compression(config),
        *_precision(config.train),
        *(_graph(config, sizes) if not layout else ()),
        *_learning_rate(config.optim, config.train.steps),
        *_optimizer(config.optim),
        *_saving(config.checkpoint),
        *(_sources(config) if data else ()),
        *_data(config),
        *_places(config.checkpoint),
        *_no_urls(config),
        *_faults(config),
    ]


def _places(checkpoint: CheckpointConfig) -> Iterator[str]:
    for key in ("folder", "resume", "weights"):
        value = getattr(checkpoint, key)
        if value is not None and is_url(value):
            mistake = url_mistake(value)
            if mistake:
                yield f"checkpoint.{key}: {mistake}"


def _no_urls(config: RunConfig) -> Iterator[str]:
    """Yield the keys that take no URL and have one. Its text is not repeated: it may be secret."""
    paths = {
        "run.dir": config.run.dir,
        "checkpoint.memory_dir": config.checkpoint.memory_dir,
        "parallel.cluster": config.parallel.cluster,
        "data.tokenizer": config.data.tokenizer,
        "meter.wandb": config.meter.wandb,
        **{f"data.sources.{n}.path": one.path for n, one in enumerate(config.data.sources)},
    }
    for key, value in paths.items():
        takes = "the name of a project" if key == "meter.wandb" else "a path of this machine"
        if value is not None and is_url(value):
            yield (
                f"{key}: takes {takes} and no URL; URLs are taken by checkpoint.folder, "
                "checkpoint.resume and checkpoint.weights"
            )
        elif key == "meter.wandb" and value is not None and _API_KEY.fullmatch(value):
            yield f"{key}: takes {takes}, not an API key; give that in WANDB_API_KEY"


def _further_ahead(config: RunConfig) -> Iterator[str]:
    depth, train = config.model.mtp_depth, config.train
    if depth and config.model.emulate is not None:
        yield (
            f"model.mtp_depth={depth} predicts with blocks, and those of model.emulate have no "
            "weights; use model.mtp_depth=0"
        )
    if depth >= train.seq:
        yield (
            f"model.mtp_depth={depth} looks past the end of every sample of train.seq={train.seq} "
            f"tokens; use {train.seq - 1} or less"
        )
    default = type(train).model_fields["mtp_weight"].default
    if not depth and train.mtp_weight != default:
        yield (
            f"train.mtp_weight={train.mtp_weight:g} has no effect with model.mtp_depth=0; leave it "
            "out, or use model.mtp_depth=1"
        )


def _vocabulary(config: RunConfig) -> Iterator[str]:
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        if config.model.vocab is None:
            yield "model.vocab and data.tokenizer are both missing; set one of them"
        return
    kind, _, path = tokenizer.partition(":")
    if tokenizer != "bytes" and (kind not in TOKENIZERS or not path):
        yield (
            f"data.tokenizer={tokenizer} is not of the form KIND:PATH; use "
            f"{', '.join(f'{kind}:PATH' for kind in TOKENIZERS)} or bytes"
        )


def _batches(train: TrainConfig, data: int) -> Iterator[str]:
    together = train.microbatch * data
    on_ranks = f"train.microbatch={train.microbatch} on {data} data rank{'s' if data > 1 else ''}"
    top = train.global_batch
    if top % together:
        yield (
            f"train.global_batch={top} does not divide into microbatches of {on_ranks}; "
            f"use {nearest_multiples(together, top)}"
        )
        top = max(1, round(top / together)) * together  # what a ramp is to rise to
    if top // together > _MOST_MICROBATCHES:
        yield (
            f"train.global_batch={top} is {top // together} microbatches of {on_ranks}, and a step "
            f"has at most {_MOST_MICROBATCHES}; use at most "
            f"{_MOST_MICROBATCHES * together}, or a larger train.microbatch"
        )
    if train.batch_ramp is not None:
        yield from _ramp(train.batch_ramp, top, together, on_ranks)


def _ramp(ramp: BatchRampConfig, top: int, together: int, on_ranks: str) -> Iterator[str]:
    """Yield what is wrong with a ramp to a global batch of `top`, a multiple of `together` samples:
    every step's batch must be a multiple of it, too."""
    name, start, increment = "train.batch_ramp", ramp.start, ramp.increment
    wrong = []
    sizes = {f"{name}.start": start, f"{name}.increment": increment}
    uneven = [f"{key}={size}" for key, size in sizes.items() if size % together]
    if uneven:
        do = "does" if len(uneven) == 1 else "do"
        wrong.append(f"{' and '.join(uneven)} {do} not divide into microbatches of {on_ranks}")
    if start > top:
        wrong.append(f"{name}.start={start} is more than train.global_batch={top}")
    elif start % increment:
        wrong.append(f"{name}.start={start} is not a multiple of {name}.increment={increment}")
    elif (top - start) % increment:
        wrong.append(
            f"{name}.increment={increment} does not divide the rise from {name}.start={start} to "
            f"train.global_batch={top}, {top - start}"
        )
    if wrong:
        yield f"{'; '.join(wrong)}; use {join_or(_ramps(ramp, top, together))}"


def _ramps(ramp: BatchRampConfig, top: int, together: int) -> Iterator[str]:
    """Yield the nearest ramps that divide. If only the start is wrong, these are the start below
    and the one above; otherwise the increment below and the one above, each with its nearest
    start."""
    # Increments divide the start and the rise to `top`, and therefore `top` itself.
    fitting = [together * number for number in divisors(top // together)]
    if ramp.increment in fitting:
        below = min(top, ramp.start) // ramp.increment * ramp.increment
        starts = (size for size in (below, below + ramp.increment) if 0 < size <= top)
        yield f"train.batch_ramp.start={join_or(starts)}"
        return
    smaller = [size for size in fitting if size < ramp.increment][-1:]
    larger = [size for size in fitting if size > ramp.increment][:1]
    for increment in (*smaller, *larger):
        start = min(top, max(1, round(ramp.start / increment)) * increment)
        yield f"train.batch_ramp.start={start} with train.batch_ramp.increment={increment}"


def _stages(config: RunConfig) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.layers
    pipeline, chunks = parallel.pipeline, parallel.chunks
    stages = pipeline * chunks
    what = f"parallel.pipeline={pipeline}" + f"{TIMES}parallel.chunks={chunks}" * (chunks > 1)
    if stages > layers:
        mend = [f"parallel.pipeline={min(pipeline, layers)}"]
        if chunks > 1 and pipeline <= layers:
            mend = [
                f"parallel.chunks={layers // pipeline}",
                f"parallel.pipeline={layers // chunks}",
            ]
        valid = join_or(text for text in mend if not text.endswith("=0"))
        yield f"{what} is {stages} stages for model.layers={layers}; use {valid}"
        return
    given = parallel.layers_per_stage
    if given is not None and (len(given) != stages or sum(given) != layers):
        wrong = f"has {len(given)} stages, but {what} makes {stages}"
        if len(given) == stages:
            wrong = f"sums to {sum(given)}, not to model.layers={layers}"
        even = tuple((layers + number) // stages for number in reversed(range(stages)))
        yield (
            f"parallel.layers_per_stage={format_value(given)} {wrong}; use for example "
            f"{format_value(even)}, "
            "or leave it out to divide by work"
        )
    blocks = config.train.recompute_blocks
    if isinstance(blocks, tuple) and len(blocks) != stages:
        fitting = (blocks + (blocks[-1:] or (0,)) * stages)[:stages]
        yield (
            f"train.recompute_blocks={format_value(blocks)} has {len(blocks)} stages, but {what} "
            "makes "
            f"{stages}; use for example {format_value(fitting)}, or one number for all"
        )


def _schedule(config: RunConfig, data: int) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    group = parallel.schedule_microbatches
    if group is not None and parallel.schedule == "interleaved" and not group.is_integer():
        yield (
            f"parallel.schedule_microbatches={group:g} is not a whole number, as "
            f"parallel.schedule=interleaved needs; use {int(group)} or {int(group) + 1}"
        )
    sizes = {train.global_batch} | ({train.batch_ramp.start} if train.batch_ramp else set())
    together = train.microbatch * data
    found: dict[str, None] = {}  # ordered; most mistakes are the same for every batch size
    for size in sorted(sizes):
        if size % together == 0:
            found |= dict.fromkeys(
                schedule_mistakes(
                    parallel.schedule,
                    parallel.pipeline,
                    parallel.chunks,
                    size // together,
                    group=None if parallel.schedule == "search" or group is None else int(group),
                )
            )
    yield from found


def _compression(config: RunConfig) -> Iterator[str]:
    parallel, precision = config.parallel, config.train.precision
    name = f"parallel.compress={parallel.compress}"
    if parallel.compress != "none" and precision == "fp16":
        yield (
            f"{name} keeps what it has not sent for the next step, whose loss scale "
            "train.precision=fp16 may change; use bf16 or fp32, or parallel.compress=none"
        )
    keep = parallel.compress_keep
    if keep is None:
        return
    if parallel.compress not in ("topk", "powersgd"):
        yield (
            f"parallel.compress_keep={keep:g} has no effect with {name}; leave it out, or use "
            "parallel.compress=topk or powersgd"
        )
    elif parallel.compress == "topk" and keep > 1:
        yield (
            f"parallel.compress_keep={keep:g} is more than all elements, of which {name} sends a "
            "share; use 1 or less"
        )
    elif parallel.compress == "powersgd" and not keep.is_integer():
        yield (
            f"parallel.compress_keep={keep:g} is not a whole number of columns, as {name} needs; "
            f"use {max(1, round(keep))}"
        )


def _precision(train: TrainConfig) -> Iterator[str]:
    if train.fp8 != "none" and train.precision == "fp16":
        yield (
            f"train.fp8={train.fp8} has no gradient scale, which train.precision=fp16 needs; use "
            "train.precision=bf16"
        )
    again = train.recompute_blocks
    none = again == 0 if isinstance(again, int) else not any(again)
    if train.offload and train.recompute != "full" and none:
        yield (
            "train.offload=true moves the inputs of recomputed blocks, and train.recompute="
            f"{train.recompute} with train.recompute_blocks={format_value(again)} has none; use "
            "train.recompute=full, or train.recompute_blocks=1 or more"
        )


def _graph(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    if config.train.cuda_graph:
        for reason in graph_reasons(config, sizes):
            yield f"train.cuda_graph=true cannot work here: {reason}"


def _still_rising(optim: OptimConfig, steps: int) -> str | None:
    if optim.warmup <= steps:
        return None
    return (
        f"optim.warmup={optim.warmup} is longer than train.steps={steps}: the learning rate is "
        "still rising when the run ends"
    )


def _nothing_to_compare(config: RunConfig, layout: Layout) -> str | None:
    every, zero = config.faults.compare_every, config.parallel.zero
    if not every or not zero or layout.data_replicate > 1:
        return None
    return (
        f"faults.compare_every={every} compares nothing: with parallel.zero={zero} and "
        "parallel.data_replicate=1 no rank has the weights of another; use parallel.zero=0, or "
        "parallel.data_replicate=2 or more"
    )


def _learning_rate(optim: OptimConfig, steps: int) -> Iterator[str]:
    if optim.min_lr > optim.lr:
        yield (
            f"optim.min_lr={optim.min_lr:g} is above optim.lr={optim.lr:g}; "
            f"use {optim.lr:g} or less"
        )
    if optim.decay is None:
        return
    room = steps - optim.warmup
    if optim.schedule == "wsd" and optim.decay >= steps:
        yield (
            f"optim.decay={optim.decay} steps of final decay are not fewer than train.steps="
            f"{steps}; use {max(1, steps // 5)} (a fifth)"
        )
    elif optim.schedule == "wsd" and optim.decay > room >= 0:
        yield (
            f"optim.warmup={optim.warmup} and the final optim.decay={optim.decay} steps overlap "
            f"in train.steps={steps}; use optim.decay={room} or fewer"
        )
    if optim.schedule in ("cosine", "linear") and optim.decay <= optim.warmup:
        yield (
            f"optim.decay={optim.decay}, the step at which optim.min_lr is reached, is not after "
            f"optim.warmup={optim.warmup}; use {optim.warmup + 1} or more"
        )


def _optimizer(optim: OptimConfig) -> Iterator[str]:
    """Yield mistakes in keys that only some optimizers have."""
    with_momentum = ("muon", "sgd")
    for key, value in (("momentum", optim.momentum), ("nesterov", optim.nesterov)):
        if value is not None and optim.name not in with_momentum:
            yield (
                f"optim.{key}={format_value(value)} has no effect with optim.name={optim.name}; "
                "leave it "
                f"out, or use optim.name={join_or(with_momentum)}"
            )
    if optim.nesterov and optim.momentum == 0:
        yield (
            "optim.nesterov=true looks ahead along optim.momentum=0; use optim.nesterov=false, or "
            "a momentum such as 0.9"
        )


def _saving(checkpoint: CheckpointConfig) -> Iterator[str]:
    every, kept = checkpoint.every, checkpoint.keep_every
    if kept and not every:
        yield (
            f"checkpoint.keep_every={kept} has no effect with checkpoint.every=0, which saves "
            "nothing; leave it out"
        )
    elif kept and kept % every:
        yield (
            f"checkpoint.keep_every={kept} is not a multiple of checkpoint.every={every}; "
            f"use {nearest_multiples(every, kept)}"
        )


def _sources(config: RunConfig) -> Iterator[str]:
    if not config.data.sources:
        yield NO_SOURCES


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    splits = {"data.split": data.split}
    for number, source in enumerate(data.sources):
        if source.split is not None:
            splits[f"data.sources[{number}].split"] = source.split
    if len(splits) > len(data.sources) > 0:
        del splits["data.split"]  # unused, because every source has its own split
    totals = {key: sum(split) for key, split in splits.items()}
    wrong = {key: total for key, total in totals.items() if abs(total - 1) > 1e-6}
    for key, total in wrong.items():
        parts = [round(part / total, 6) for part in splits[key]] if total else [1, 0, 0]
        yield (
            f"{key}={format_value(splits[key])} sums to {total:g}, not 1; use {format_value(parts)}"
        )
    text = ", ".join(f"{key}={format_value(split)}" for key, split in splits.items())
    if not wrong and not any(split[0] for split in splits.values()):
        yield f"{text} leaves nothing to train on; use a split such as [0.98, 0.02, 0]"
    if config.train.eval_every and not any(split[1] for split in splits.values()):
        yield (
            f"train.eval_every={config.train.eval_every} needs a validation split, and {text} has "
            "none; use train.eval_every=0 or a split such as [0.98, 0.02, 0]"
        )


def _faults(config: RunConfig) -> Iterator[str]:
    faults, precision = config.faults, config.train.precision
    if faults.non_finite != "skip" and precision == "fp16":
        yield (
            f"faults.non_finite={faults.non_finite} would act on every overflow by which "
            "train.precision=fp16 finds its loss scale; use faults.non_finite=skip, or bf16"
        )
    way_back = {
        "faults.non_finite=roll_back": faults.non_finite == "roll_back",
        f"faults.spike_factor={faults.spike_factor}": faults.spike_factor is not None,
        f"faults.compare_every={faults.compare_every}": faults.compare_every > 0,
    }
    for name, wanted in way_back.items():
        if wanted and not config.checkpoint.every:
            yield (
                f"{name} goes back to a checkpoint, and checkpoint.every=0 saves none; use "
                "checkpoint.every=100 or so"
            )
