"""Random legal runs: a model of any parts, a layout of 1 to 8 ranks, and how it is trained.

Keys come from the config classes, so that new options are drawn as soon as they exist; the lists
here say only which values are likely to fit each other. What `find_mistakes` still refuses is
mended by leaving out a key that it names, unless it is one of `HELD`.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod

from hypothesis import assume
from hypothesis import strategies as st
from pydantic import ValidationError
from repo_copy import ROOT
from section_strategies import draw_keys, draw_sections

from megaframe.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megaframe.config.adapters import AdaptersConfig, QuantisationConfig
from megaframe.config.blocks import BlockConfig, CompressionConfig
from megaframe.config.model import IndexerConfig
from megaframe.config.registry import Registry, get_registry, use_registry
from megaframe.errors import list_divisors
from megaframe.extensions import load_extensions
from megaframe.schedule import SCHEDULE_NAMES, find_schedule_mistakes
from megaframe.validate.run import find_mistakes

_NOT_DRAWN = {ROOT / "examples" / name for name in ("library.py", "transformers_layer.py")}
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - _NOT_DRAWN)
"""Extensions whose parts are drawn, too: all but the program that uses the library, and the one
whose import takes every process seconds."""
RANKS = (1, *(2,) * 5, 3, *(4,) * 6, *(6,) * 2, *(8,) * 3, 5, 7)
"""Numbers of ranks; the more often one is here, the more often it is drawn."""
AXES = ("data", "tensor", "context", "pipeline")
NOT_PROMISED = {
    "parallel": {"compress", "compress_keep", "reduce_precision", "islands"},
    "train": {"precision", "fp8"},
    "model.moe": {"capacity"},
}
"""Keys that make a result depend on the layout, or on rounding to fewer bits."""
NOT_DRAWN = {
    "parallel": {"auto", "cluster", "symmetric_memory", "timeout"},
    "train": {
        *("steps", "stop_after", "compile", "cuda_graph", "batch_ramp"),
        *("eval_every", "eval_samples"),
        *("sample_every", "sample_prompts", "sample_tokens", "sample_temperature"),
    },
    "model": {"init_std", "emulate", "family", "blocks", "latent", "moe", "indexer"},
    "model.moe": set(),
}
"""Keys without an effect on these two steps, or drawn on their own; compilation and graphs have
their own tests of parity, with one process and a GPU."""
HELD = {
    *(f"parallel.{key}" for key in (*AXES, "chunks", "schedule")),
    *(f"model.{key}" for key in ("layers", "hidden", "heads", "vocab", "moe", "latent", "blocks")),
    "model.indexer",
    *(f"train.{key}" for key in ("seq", "global_batch", "microbatch")),
}
"""Keys that are not left out to mend a mistake: they were drawn to fit each other."""
WIDE_EPS = {"adabelief": {"belief_eps": 1e-6}}
"""Keys of optimizers from outside that divide by the size of gradients: as with AdamW, a small one
would let rounding decide where gradients are zero but for it."""
PARTS = ("second_mixer", "mixer", "feed_forward")
"""Keys of a block that have a kind."""
MOST_STAGES, MOST_MICROBATCHES, MOST_REPAIRS = 12, 8, 40


@dataclass(frozen=True)
class RandomRun:
    """A run that is compared with the same run on one rank.

    Attributes:
        ranks: Number of ranks.
        sections: `model`, `train`, `parallel`, `optim` and `run`, as a config file has them.
        packed: Whether samples consist of several documents.
        ragged: Whether samples have different lengths, with one per microbatch.
    """

    ranks: int = 1
    sections: dict = field(default_factory=dict)
    packed: bool = False
    ragged: bool = False

    @property
    def mechanisms(self):
        """What the run shows, roughly: the axes and choices that are words, without sizes."""
        model, parallel = self.sections["model"], self.sections["parallel"]
        words = {value for value in parallel.values() if isinstance(value, str)}
        axes = {key for key, size in parallel.items() if type(size) is int and size > 1}
        parts = {"blocks", "latent", "moe", "indexer"} & {*model} | find_part_names(self.sections)
        return frozenset(words | axes | parts | {self.sections["train"].get("recompute")})


@st.composite
def random_runs(draw, most_ranks=8):
    """Draw a legal `RandomRun`."""
    ranks = draw(st.sampled_from([number for number in RANKS if number <= most_ranks]))
    sizes = dict(zip(AXES, draw(st.sampled_from(list_axis_sizes(ranks))), strict=True))
    parallel = {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}
    schedule, chunks, microbatches = "1f1b", 1, draw(st.sampled_from((2, 1, 3)))
    if sizes["pipeline"] > 1:
        schedule = draw(st.sampled_from(SCHEDULE_NAMES))
        steps = list_step_sizes(schedule, sizes["pipeline"])
        assume(steps)
        chunks, microbatches = draw(st.sampled_from(steps))
        parallel |= {"schedule": schedule} | ({"chunks": chunks} if chunks > 1 else {})
    stages = sizes["pipeline"] * chunks
    ragged = draw(st.integers(0, 5)) == 5
    seq, microbatch = draw(st.integers(4, 12)), 1 if ragged else draw(st.sampled_from((1, 2, 3)))
    global_batch = sizes["data"] * microbatch * microbatches
    layers = stages + draw(st.integers(0, 2))
    exchanging = draw_context_kind(draw, parallel, sizes["context"])
    model = draw_model(draw, layers, seq, sizes["tensor"], exchanging)
    parallel |= draw_layout_options(draw, sizes, stages, model["layers"], ranks, "moe" in model)
    train = draw_keys(
        draw,
        TrainConfig,
        {"TrainConfig.recompute_blocks": make_per_stage(stages)},
        {*NOT_PROMISED["train"], *NOT_DRAWN["train"], "seq", "global_batch", "microbatch"},
        {"recompute"},
    )
    train |= {"seq": seq, "global_batch": global_batch, "microbatch": microbatch}
    names = get_registry().list_names("optimizer")
    optimizers = [{"name": "sgd"}, {"name": "adamw", "eps": 1e-3}]
    optimizers += [{"name": {"kind": name, **WIDE_EPS.get(name, {})}} for name in names]
    optim = draw(st.sampled_from(optimizers))
    sections = {"model": model, "train": train, "parallel": parallel, "optim": optim}
    assume(repair(sections, ranks))
    if find_part_names(sections):
        names = [extension.name for extension in get_registry().extensions]
        sections["run"] = {"extensions": names}
    packed = draw(st.integers(0, 3)) == 3
    return RandomRun(ranks, sections, packed, ragged)


def find_part_names(value):
    """Return the names of the parts of extensions in a config, or in a value of one."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return set().union(*map(find_part_names, value))
    return {name for _, name in get_registry().parts if name == value}


@contextmanager
def use_examples():
    """Within it the parts of all examples are registered, and drawn like our own."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{', '.join(map(str, EXAMPLES))}]"])
        yield


def draw_context_kind(draw, parallel, context):
    """Add to `parallel` how context ranks exchange, and return how many exchange heads."""
    if context == 1:
        return 1
    inner = list_divisors(context)[1:-1]
    kinds = ("ring", "all_to_all", *(("nested",) if inner else ()))
    parallel["context_kind"] = draw(st.sampled_from(kinds))
    if parallel["context_kind"] == "nested":
        parallel["context_heads"] = draw(st.sampled_from(inner))
        return parallel["context_heads"]
    return context if parallel["context_kind"] == "all_to_all" else 1


def draw_layout_options(draw, sizes, stages, layers, ranks, moe):
    """Return the keys of `parallel` beside the sizes of the four axes and what goes with them."""
    drawn = {*AXES, "context_kind", "context_heads", "chunks", "schedule"}
    of_stage = ranks // sizes["pipeline"]
    several = list_divisors(of_stage)[1:]
    expert_ranks = draw(st.sampled_from([1, *several, *several])) if moe else 1
    expert = draw(st.sampled_from(list_divisors(expert_ranks)))
    replicas = list_divisors(sizes["data"])
    values = {
        "data_replicate": st.sampled_from(replicas) if len(replicas) > 1 else None,
        "tensor_chunks": st.sampled_from((1, 2, 3)) if sizes["tensor"] > 1 else None,
        "expert": st.just(expert) if expert > 1 else None,
        "expert_tensor": st.just(expert_ranks // expert) if expert_ranks > expert else None,
        "node_size": st.sampled_from(list_divisors(ranks)),
        "bucket_size": st.sampled_from(("auto", 100, 2500, 10**6)),
        "layers_per_stage": draw_division(stages, layers) if stages > 1 else None,
        "schedule_microbatches": st.sampled_from((1, 2, 3, 4)) if sizes["pipeline"] > 1 else None,
    }
    keys_set = {"zero", "data_replicate"}
    if expert_ranks > 1:
        keys_set |= {"expert", "expert_tensor", "dispatch", "expert_overlap"}
    else:
        drawn |= {"dispatch", "expert_overlap"}
    return draw_keys(
        draw,
        ParallelConfig,
        {f"ParallelConfig.{key}": strategy for key, strategy in values.items()},
        {*NOT_PROMISED["parallel"], *NOT_DRAWN["parallel"], *drawn},
        keys_set,
    )


@st.composite
def draw_division(draw, stages, layers):
    """Draw the number of layers of each stage, which may be none."""
    ends = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return [end - start for start, end in zip([0, *ends], [*ends, layers], strict=True)]


def make_per_stage(stages):
    """Return a strategy of `train.recompute_blocks`: one number, or one per stage."""
    number = st.integers(0, 2)
    return st.one_of(number, st.lists(number, min_size=stages, max_size=stages))


def draw_model(draw, layers, seq, tensor, exchanging):
    """Return the keys of `model`.

    Args:
        draw: As hypothesis gives it to a composite strategy.
        layers: Number of layers at least.
        seq: Tokens per sample.
        tensor: Tensor ranks, which divide heads and widths.
        exchanging: Context ranks that exchange heads for tokens.
    """
    # Whatever is drawn late is often the simplest: hypothesis draws short examples, too.
    kind = draw(st.sampled_from(("", "blocks", "moe", "blocks", "latent", "latent moe")))
    pairs = list_heads(tensor, exchanging)
    heads, kv_heads = draw(st.sampled_from(pairs))
    hidden = heads * draw(st.sampled_from([w for w in (4, 2, 6, 8) if heads * w <= 32] or [2]))
    widths = st.integers(max(tensor, 5), 24)
    even, number_of_heads = st.sampled_from((4, 2, 6, 8)), st.sampled_from([h for h, _ in pairs])
    groups = st.sampled_from(sorted({kv for _, kv in pairs}))
    windows, bases = st.integers(1, seq), st.sampled_from((10000.0, 100.0))
    values = {
        "ModelConfig.ffn": widths,
        "ModelConfig.head_dim": even,
        "ModelConfig.norm_eps": st.sampled_from((1e-5, 1e-3)),
        "ModelConfig.positions": st.sampled_from((seq, seq + 3)),
        "ModelConfig.rotary_base": bases,
        "ModelConfig.layer_vocab": st.integers(max(tensor, 3), 45),
        "ModelConfig.mtp_depth": st.sampled_from((1, 2, 0)),
        "ModelConfig.mup_base_hidden": st.sampled_from((hidden, 4, 3)),
        "ModelConfig.mup_base_head_dim": even,
        "ModelConfig.window": st.one_of(windows, st.lists(st.none() | windows, min_size=1)),
        "RotaryScalingConfig.kind": st.sampled_from(
            ("none", "linear", "dynamic", "llama3", "yarn", "proportional")
        ),
        "RotaryScalingConfig.original_length": st.sampled_from((8, 16)),
        **{f"RotaryScalingConfig.{key}_factors": None for key in ("short", "long")},
        "AttentionConfig.heads": number_of_heads,
        "AttentionConfig.kv_heads": groups,
        "AttentionConfig.head_dim": even,
        "AttentionConfig.v_head_dim": st.integers(2, 6),
        "AttentionConfig.window": windows,
        "AttentionConfig.attention_chunk": windows,
        "AttentionConfig.rotary_base": bases,
        "AttentionConfig.rotary_fraction": st.sampled_from((0.5, 1.0)),
        "AttentionConfig.alibi": st.sampled_from((8.0, 4.0)),
        "QueryScaleConfig.rate": st.sampled_from((0.1, 0.5)),
        "QueryScaleConfig.length": windows,
        "LatentMixerConfig.window": windows,
        "CompressedAttentionConfig.heads": number_of_heads,
        "CompressedAttentionConfig.head_dim": even,
        "CompressedAttentionConfig.query_rank": st.integers(3, 8),
        "CompressedAttentionConfig.window": windows,
        "CompressedAttentionConfig.output_groups": st.just(tensor),
        "CompressedAttentionConfig.output_rank": st.integers(2, 6),
        "CompressedAttentionConfig.rotary_base": bases,
        "CompressedAttentionConfig.rotary_fraction": st.sampled_from((0.5, 1.0)),
        "CompressionConfig.tokens": st.integers(1, 5),
        "CompressedIndexerConfig.heads": st.integers(1, 4),
        "CompressedIndexerConfig.head_dim": st.sampled_from((8, 9)),
        "CompressedIndexerConfig.top_k": st.integers(1, 4),
        "ModelConfig.activation_limit": st.sampled_from((0.5, 2.0)),
        "GatedDeltaNetConfig.key_heads": st.sampled_from((tensor, 2 * tensor)),
        "GatedDeltaNetConfig.value_heads": st.sampled_from((2 * heads, 4 * heads)),
        "GatedDeltaNetConfig.key_dim": st.integers(2, 6),
        "GatedDeltaNetConfig.value_dim": st.integers(2, 6),
        "GatedDeltaNetConfig.convolution": st.integers(1, 6),
        "GatedDeltaNetConfig.decay_rank": st.integers(2, 6),
        "GatedDeltaNetConfig.gate_rank": st.integers(2, 6),
        "GatedDeltaNetConfig.norm_eps": st.sampled_from((1e-5, 1e-3)),
        "GatedDeltaNetConfig.chunk": st.integers(1, seq),
        "GatedShortConvolutionConfig.convolution": st.integers(1, 6),
        "Mamba2Config.heads": st.sampled_from((2 * tensor, 4 * tensor)),
        "Mamba2Config.head_dim": st.integers(2, 6),
        "Mamba2Config.groups": st.sampled_from((tensor, 1, 2 * tensor)),
        "Mamba2Config.state_dim": st.integers(2, 6),
        "Mamba2Config.convolution": st.integers(1, 6),
        "Mamba2Config.step_min": st.just(0.02),
        "Mamba2Config.step_max": st.just(0.05),
        "Mamba2Config.chunk": st.integers(1, seq),
        "AdaptersConfig.rank": st.integers(1, 3),
        "AdaptersConfig.alpha": st.sampled_from((1.0, 6.0)),
        "AdaptersConfig.targets": st.sampled_from((["*"], ["query", "down"], ["mlp.*", "moe.*"])),
        "QuantisationConfig.block": st.sampled_from((1, 2)),
        "QuantisationConfig.absmax_block": st.sampled_from((2, 1)),
        "AdaptersConfig.layers": st.sampled_from(([0], [0, 1])),
        "MLPConfig.ffn": widths,
        "BlockConfig.laurel_rank": st.integers(1, 5),
        "HyperConnectionsConfig.number": st.integers(2, 4),
        "HyperConnectionsConfig.iterations": st.integers(1, 4),
        "HyperConnectionsConfig.eps": st.sampled_from((1e-6, 0.1)),
        "AltUpConfig.number": st.integers(2, 4),
        "BlockConfig.repeat": st.integers(1, 2),
        "IndexerConfig.heads": st.integers(1, 4),
        "IndexerConfig.head_dim": st.sampled_from((8, 9)),
        "IndexerConfig.top_k": st.integers(1, seq),
        "IndexerConfig.loss": st.sampled_from((0.5, 2.0)),
        "LatentAttentionConfig.query_rank": st.integers(3, 8),
        "LatentAttentionConfig.kv_rank": st.integers(3, 8),
        "LatentAttentionConfig.head_dim": st.integers(2, 6),
        "LatentAttentionConfig.rotary_dim": even,
        "LatentAttentionConfig.value_dim": st.integers(2, 6),
        "LatentAttentionConfig.norm_eps": st.sampled_from((1e-5, 1e-3)),
        "MoEConfig.experts": st.sampled_from((4, 8, 6, 5, 2)),
        "MoEConfig.ffn": widths,
        "MoEConfig.balance_rate": st.just(0.05),
        "MoEConfig.normalise_eps": st.sampled_from((1e-6, 0.1)),
        **{f"MoEConfig.{key}": None for key in NOT_PROMISED["model.moe"]},
    }
    # Codes are refused with most layouts, so they are drawn more often than other keys.
    codes = draw_sections(QuantisationConfig, values, given=("block", "absmax_block"))
    values["AdaptersConfig.quantize_base"] = codes
    coded = draw_sections(AdaptersConfig, values, given=("quantize_base",))
    values["ModelConfig.adapters"] = coded | draw_sections(AdaptersConfig, values)
    chosen = draw_sections(CompressionConfig, values, given=("indexer", "overlap"))
    values["CompressedAttentionConfig.compression"] = chosen | draw_sections(
        CompressionConfig, values
    )
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    sizes["vocab"] = draw(st.integers(max(tensor, 11), 41))
    model = {}
    if kind == "blocks":
        block = draw_sections(BlockConfig, values, given=("mixer", "feed_forward"))
        model["blocks"] = draw(st.lists(block, min_size=1, max_size=3))
        sizes["layers"] = max(layers, sum(keys.get("repeat", 1) for keys in model["blocks"]))
        parts = [keys.get(part, {}) for keys in model["blocks"] for part in PARTS]
        used = {part.get("kind") for part in parts}
    else:
        used = {*kind.split()}
    for key in sorted(used & {"latent", "moe"}):
        section = find_section(ModelConfig.model_fields[key].annotation)
        model[key] = draw_keys(draw, section, values)
    if "query_rank" in model.get("latent", {}) and draw(st.booleans()):
        model["indexer"] = draw_keys(draw, IndexerConfig, values)
    model |= draw_keys(draw, ModelConfig, values, {*NOT_DRAWN["model"], *sizes}) | sizes
    if "activation_limit" in model:
        model["activation"] = "swiglu"
    if "latent" in model:
        model |= {"kv_heads": heads, "qkv_bias": False, "position": "rotary"}
    return model


def find_section(annotation):
    """Return the class of an optional section."""
    (section,) = (member for member in annotation.__args__ if member is not type(None))
    return section


@cache
def list_heads(tensor, exchanging):
    """Return pairs of query heads, and key and value heads, that ranks can divide or share."""
    unit = tensor * exchanging
    pairs = []
    for heads in sorted({unit, 2 * unit, 3 * unit, *(h for h in (4, 6, 8) if h % unit == 0)}):
        for kv_heads in reversed(list_divisors(heads)):
            groups = max(1, kv_heads // tensor)
            if (kv_heads % tensor == 0 or tensor % kv_heads == 0) and (
                groups % exchanging == 0 or exchanging % groups == 0
            ):
                pairs.append((heads, kv_heads))
    return pairs


@cache
def list_step_sizes(schedule, pipeline):
    """Return the pairs of chunks, and microbatches of a step, for which there is a schedule."""
    return [
        (chunks, microbatches)
        for chunks in (1, 2, 3)
        for microbatches in range(1, MOST_MICROBATCHES + 1)
        if pipeline * chunks <= max(MOST_STAGES, 2 * pipeline)
        and microbatches <= pipeline + 2
        and not find_schedule_mistakes(schedule, pipeline, chunks, microbatches)
    ]


@cache
def list_axis_sizes(ranks):
    """Return all sizes of the four axes for a number of ranks, those of few axes first."""
    divisors = list_divisors(ranks)
    sizes = [
        axis_sizes
        for axis_sizes in product(divisors, repeat=len(AXES))
        if prod(axis_sizes) == ranks
    ]
    return sorted(sizes, key=lambda axis_sizes: sum(size > 1 for size in axis_sizes))


def repair(sections, ranks):
    """Leave out keys of a config until it is legal. Returns whether it is."""
    for _ in range(MOST_REPAIRS):
        mistakes = list_named_keys(sections, ranks)
        if not mistakes:
            return True
        sections_of_keys = [path[:-1] for path in mistakes[0] if len(path) > 2]
        if not any(leave_out(sections, path) for path in (*mistakes[0], *sections_of_keys)):
            return False
    return False


def list_named_keys(sections, ranks):
    """Return for each mistake in a config the keys that it names, as lists of parts."""
    try:
        config = RunConfig(**sections)
    except ValidationError as error:
        return [[list(mistake["loc"])] for mistake in error.errors()]
    named = []
    for message in find_mistakes(config, ranks, data=False):
        block = re.match(r"model\.blocks\.(\d+): ", message)
        of_layer = re.match(r"layer (\d+): (shared_[a-z]+)=true ", message)
        paths = []
        if of_layer:
            pattern = [n for n, each in enumerate(config.model.blocks) for _ in range(each.repeat)]
            start = ["model", "blocks", str(pattern[int(of_layer[1]) % len(pattern)])]
            paths += [[*start, part, of_layer[2]] for part in PARTS]
        for name in re.findall(r"\b(?:model|train|parallel)\.[a-z_]+(?:\.[a-z0-9_]+)*", message):
            path = name.split(".")
            if block and path[-1] != "kind":  # without which no other key of the part is legal
                start = ["model", "blocks", block[1]]
                for part in PARTS:
                    paths += [[*start, part, *path[1:]], [*start, part, path[-1]]]
            paths.append(path)
        named.append(paths)
    return named


def leave_out(sections, path):
    """Remove a key from a config, if it is there and not held. Returns whether it was removed."""
    if ".".join(map(str, path)) in HELD:
        return False
    inner = sections
    for part in path[:-1]:
        if isinstance(inner, list) and str(part).isdigit():
            inner = inner[int(part)]
        elif isinstance(inner, dict) and part in inner:
            inner = inner[part]
        elif isinstance(inner, dict) and inner.get("kind") == part:
            continue  # the name of a kind, in an error of pydantic
        else:
            return False
    return isinstance(inner, dict) and inner.pop(path[-1], None) is not None
