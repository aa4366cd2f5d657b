"""Random models of transformers and of ours, and the logits that each side computes for them."""

import math
import zlib
from functools import cache

import torch
from tolerances import assert_near

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface.model_folder import export_model, import_model
from megaframe.checkpoint.reshard import assemble_checkpoint
from megaframe.checkpoint.shard_file import TensorBox
from megaframe.checkpoint.train_state import make_initial_train_state
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.inference.generation import SampleRequest, SamplingOptions, load_stage, sample_batch
from megaframe.model.model_chunk import list_model_specs
from megaframe.ops.operator_mode import OperatorMode

SUMS = 4 * (6 * 32 + 18) + 32
"""Lengths of the sums from a token to a logit: in four layers, six products with sums over 32
channels, and 18 tokens; and the head."""
TOKENS = torch.randint(0, 61, (2, 18), generator=torch.Generator().manual_seed(0))


@cache
def get_auto_model():
    """Return transformers' class that finds others, with one that it does not list."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return AutoModelForCausalLM


def save_random_model(config, path):
    """Save a random model with a config of transformers, and return its logits."""
    torch.manual_seed(1)
    model = get_auto_model().from_config(config).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("tid2eid"):  # different experts for each token
                experts = model.config.num_local_experts
                draws = torch.rand(len(value), experts).topk(value.shape[1]).indices
                value.copy_(draws)
            if not value.is_floating_point():
                continue
            ends = ("bias", "_scalar", "scale", "sinks", "base")
            if "norm" in key or "ln_" in key or key.endswith(ends):
                # In steps that fp32 adds exactly to 1, as some families do.
                value.add_((0.2 * torch.randn(value.shape) * 1024).round() / 1024)
    model.save_pretrained(path)
    return compute_logits(model)


@torch.no_grad()
def compute_logits(model):
    """Return the logits of a model of transformers."""
    return model(TOKENS).logits


PROMPTS, NEW_TOKENS = [[5, 1, 44, 7, 30, 2, 9], [8, 3, 60]], 8
"""Prompts that are longer and shorter than windows, and the length of what follows."""


ROUNDED = {0.79788456: math.sqrt(2 / math.pi)}
"""Constants of transformers' code, and what they are rounded from."""


class InFp64(OperatorMode):
    """Makes fp64 of what code asks for in fp32: transformers' norms, routers and rotary angles;
    and of what it leaves to the default, as GPT-J does with its angles; and of a constant of BLOOM
    that it rounds to 8 digits."""

    def __enter__(self):
        self.usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self.usual)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        args = [ROUNDED.get(x, x) if isinstance(x, float) else x for x in args]
        return function(*args, **kwargs)


def load_whole(folder, **options):
    """Return the model of transformers in a folder, all of whose tensors it needs and finds."""
    model, loaded = get_auto_model().from_pretrained(folder, output_loading_info=True, **options)
    assert not any(loaded.values()), loaded
    return model.eval()


def load_exact(folder):
    """Return the model of transformers in a folder, which `InFp64` has compute in fp64."""
    return load_whole(folder, dtype=torch.float64, experts_implementation="eager")


def compute_exact_logits(folder):
    """Return the logits of a folder of transformers, computed in fp64."""
    with InFp64():
        return compute_logits(load_exact(folder))


def compute_own_logits(path):
    """Return our logits, computed in fp64 and rounded to fp32 at the end."""
    return compute_logits_of_stage(load_stage(path, precision="fp64"))


@torch.no_grad()
def compute_logits_of_stage(stage):
    """Return the logits of a whole model of ours in fp64, rounded to fp32 at the end."""
    x = stage.compute_hidden(Microbatch(TOKENS, TOKENS, torch.arange(2)))
    return stage.head.compute_logits(x).view(2, 18, -1)


def assert_same_logits(checkpoint, folder):
    """Assert that both compute the same from fp32 weights."""
    assert_logits_near(compute_own_logits(checkpoint), compute_exact_logits(folder))


def assert_logits_near(logits, exact_logits):
    """Assert that our logits are those of transformers in fp64."""
    assert exact_logits.dtype is torch.float64
    assert_near(logits, exact_logits, SUMS, sums=torch.float64)


def assert_same_texts(stage, model):
    """Assert that a whole model of ours and one of transformers continue prompts with the same
    tokens, each the likeliest, in fp64: there one prompt after the other, here together."""
    with InFp64():
        model.generation_config.eos_token_id = None
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        expected = [model.generate(torch.tensor([p]), **options)[0].tolist() for p in PROMPTS]
    greedy = SamplingOptions()
    requests = [SampleRequest(p, NEW_TOKENS, greedy, 0, lambda ids: False) for p in PROMPTS]
    context = max(map(len, expected))
    steps = [*sample_batch(stage, requests, context=context, batch=len(PROMPTS))]
    assert {step.number: step.ids for step in steps} == dict(enumerate(expected))


def assert_same_both_ways(folder, tmp_path):
    """Assert that the model in a folder of transformers computes the same here, and again in
    transformers from `tmp_path`/again, to which it is exported; and writes the same texts."""
    checkpoint = import_model(folder, tmp_path / "own").checkpoint
    stage = load_stage(checkpoint, precision="fp64")
    logits = compute_logits_of_stage(stage)
    with InFp64():
        model = load_exact(folder)
        exact_logits = compute_logits(model)
    assert_logits_near(logits, exact_logits)
    assert_same_texts(stage, model)
    with open_checkpoint(checkpoint) as opened:
        export_model(opened, tmp_path / "again", "fp32")
    assert_logits_near(logits, compute_exact_logits(tmp_path / "again"))


def make_random_checkpoint(folder, **model):
    """Write a checkpoint of step 0 with random weights of a model, without a run."""
    run = RunConfig(model=model, train={"seq": 64, "precision": "fp32"})
    weights = {}
    for spec in list_model_specs(run.model, run.train):
        draw = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        scale = 0.2 if len(spec.shape) > 1 or spec.name.endswith("balance") else 1.0
        weights[spec.name] = scale * torch.randn(spec.shape, generator=draw)
    boxes = [
        TensorBox(name, tuple(value.shape), (0,) * value.dim(), tuple(value.shape), "F32")
        for name, value in weights.items()
    ]

    def read_bytes(entry):
        return memoryview(weights[entry.name].numpy().tobytes())

    state = make_initial_train_state(run).model_dump(mode="json")
    return assemble_checkpoint(folder, 0, state, [boxes], read_bytes)
