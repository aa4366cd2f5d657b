"""A training step with Triton kernels, in Triton's interpreter, is as exact as plain code in the
same precision: with dense blocks and with experts, on one rank, on tensor ranks and on a ring.

The truth is the same run in fp64. The errors of plain code in fp32 are measured too, and define the
tolerance; with 8-bit products, so does what they lose where a number may round to either neighbour.
"""

from functools import cache

import parity_runs as training
import pytest
import torch
from parity_runs import MODELS, run
from slow_cases import slow
from tolerances import compute_roundoff, estimate_growth

from megaframe.config.schema import KernelsConfig as Section
from megaframe.errors import UserError
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.kernel_dispatch import FAMILIES, Kernels

pytestmark = pytest.mark.numeric

MOE = {"experts": 4, "ffn": 6, "top_k": 2, "balance_loss": 0.1}
SMALL = {"layers": 1, "heads": 2}
DELTA = {"kind": "gated_delta_net", "key_dim": 5, "key_heads": 2}
SHAPES = {
    "gpt2": {**MODELS["gpt2"], "logit_softcap": 3.0},
    "llama": {**MODELS["llama"], "rotary_fraction": 0.5, "dropout": 0.1},
    "windows": {
        **{"norm": "rmsnorm", "activation": "relu2", "bias": True, "layers": 2, "init_std": 0.3},
        "blocks": [
            {"mixer": {"window": 4, "kv_heads": 1, "softcap": 1.0, "sinks": True, "v_head_dim": 2}},
            {"mixer": {"kv_heads": 1, "sinks": True}},
        ],
    },
    "recurrent": {
        **{"norm": "rmsnorm", "activation": "swiglu", "position": "none", "init_std": 0.3},
        "blocks": [
            {
                "mixer": {**DELTA, "value_heads": 4, "value_dim": 6, "decay_rank": 3},
                "second_mixer": {"kind": "mamba2", "heads": 4, "head_dim": 3, "state_dim": 5},
            }
        ],
    },
    "chosen keys": {
        **{"norm": "rmsnorm", "activation": "swiglu", "init_std": 0.3},
        "latent": {
            **{"query_rank": 8, "kv_rank": 8, "value_dim": 8},
            "head_dim": 4,
            "rotary_dim": 4,
        },
        "indexer": {"heads": 4, "head_dim": 8, "top_k": 3, "loss": 0.1},
    },
    "chosen latents": {
        **{"norm": "rmsnorm", "activation": "swiglu", "init_std": 0.3},
        "latent": {
            **{"query_rank": 8, "kv_rank": 8, "value_dim": 8},
            "head_dim": 4,
            "rotary_dim": 4,
        },
        "indexer": {"heads": 4, "head_dim": 8, "top_k": 3, "loss": 0.1, "absorb": True},
    },
    "moe": {"norm": "rmsnorm", "activation": "swiglu", "moe": {**MOE, "shared": 1}},
    "moe, tensor": {"norm": "rmsnorm", "activation": "geglu", "moe": {**MOE, "ffn": 16}},
    "moe, row": {"norm": "rmsnorm", "activation": "swiglu_clamped", "moe": {**MOE, "ffn": 16}},
    "moe, block": {"norm": "rmsnorm", "hidden": 128, "init_std": 0.06, "moe": {**MOE, "ffn": 128}},
}
"""A name's second word, after a comma, is the scaling of 8-bit products."""
TRAIN = {"microbatch": 1, "precision": "fp32", "label_smoothing": 0.1, "z_loss": 0.01}
OPTIM = {"eps": 0.01}  # with less, AdamW makes a full step of a gradient that is only rounding
FORCED = dict.fromkeys(FAMILIES, "triton")
ALWAYS = {"norm", "activation", "attention", "loss", "adamw", "square_sum"}
ROTATED = ALWAYS | {"qkv_rotary"}
RECURRENT = ALWAYS - {"attention"}
CHOSEN = RECURRENT | {"rotary"}
"""No kernel of attention knows which keys were chosen, but one of their latents does."""
LATENTS = {"sparse_attention", "attention_shares"}
EXPERTS = {"router", "grouped_product", "grouped_gradient"}
LOCAL = {"expert_order", "permute", "unpermute"}
IN_8_BITS = {"quantise", "quantise_columns", "grouped_scaled_product", "grouped_scaled_gradient"}
IN_8_BITS |= {"router", *LOCAL}
RING = {"context": 2}
CASES = [
    slow("gpt2", 1, {}, "selective", ALWAYS),
    slow("llama", 2, {"tensor": 2, "zero": 2}, "full", ALWAYS | {"rotary"}),
    slow("windows", 1, {}, "full", ROTATED | {"rotary"}),
    slow("windows", 2, RING, "none", ROTATED | {"rotary", "attention_backward"}),
    slow("recurrent", 2, RING, "none", RECURRENT | {"delta_rule", "ssd"}),
    slow("chosen keys", 1, {}, "none", CHOSEN),
    slow("chosen latents", 2, {"tensor": 2}, "none", CHOSEN | LATENTS),
    ("moe", 1, {}, "none", ROTATED | EXPERTS | LOCAL),
    slow("moe", 2, {"tensor": 2, "expert": 2}, "none", ROTATED | EXPERTS),
    slow("moe, tensor", 1, {}, "none", ROTATED | IN_8_BITS | {"quantise_experts"}),
    ("moe, row", 1, {}, "none", ROTATED | IN_8_BITS),
    slow("moe, block", 1, {}, "none", ROTATED | IN_8_BITS),
]
"""The quick ones use most kernels together; `test_kernel_reach.py` says which a config reaches."""


def run_small(*arguments):
    """`run` with one step of two samples, because the interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "GLOBAL_BATCH", 2)
        patch.setattr(training, "STEPS", 1)
        return run(*arguments)


def run_beside(push, *arguments):
    """`run_small` with all numbers pushed up or down, before they are rounded to 8 bits, by as much
    as fp32 may have been wrong about them. push: 1 or -1.

    Rounding to 8 bits is not continuous: where the error of fp32 carries a number over the boundary
    between two 8-bit numbers, results differ by far more than that error. Which numbers are so near
    to a boundary depends on the model alone, but whether they are carried over, on the processor.
    """
    product, fp32 = Fp8Matmul.multiply, torch.float32

    def beside(numbers, error):
        return numbers + push * error * numbers.abs().amax(1, keepdim=True)

    def pushed(self, left, right, *, gradient, matrix):
        activations = estimate_growth(8, fp32)  # of the row's largest number, on average over a sum
        right = beside(right, compute_roundoff(fp32) if matrix else activations)
        return product(self, beside(left, activations), right, gradient=gradient, matrix=matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Matmul, "multiply", pushed)
        return run_small(*arguments)


def run_by_kernels(*given):
    """Return the result of `run_small`, and the names of the kernels that were used."""
    names_run, find = set(), Kernels.find

    def watched(self, name, *arguments, **options):
        kernel = find(self, name, *arguments, **options)
        names_run.update([name] if kernel else [])
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "find", watched)
        return run_small(*given), names_run


@pytest.fixture(scope="module")
def known(pool):
    """known(name) -> the truth of a shape, in fp64, and by how much fp32 may miss it."""

    @cache
    def measure(name):
        exact, single = (
            make_arguments(name, {}, "none", precision) for precision in ("fp64", "fp32")
        )
        (truth,) = pool.run(1, run_small, *exact)
        lost = measure_errors(pool.run(1, run_small, *single), truth)
        # Sums have another order, so their errors are as large as those of plain sums, not equal:
        # norms of many of them by a factor below 6, but a single one may be zero by chance.
        allowed = {
            quantity: 6 * error + estimate_growth(12, torch.float32) * size
            for quantity, (error, size) in lost.items()
        }
        for push in (1, -1) if ", " in name else ():
            for what, (error, _) in measure_errors(
                pool.run(1, run_beside, push, *exact), truth
            ).items():
                allowed[what] += error
        return truth, allowed

    return measure


def make_arguments(name, parallel, recompute, precision="fp32"):
    packed = name in ("llama", "windows", "recurrent")
    train = {**TRAIN, "recompute": recompute, "precision": precision}
    if eight := name.partition(", ")[2]:
        train |= {"fp8": eight, "seq": 4}
    return {**SMALL, **SHAPES[name]}, train, parallel, False, False, packed, OPTIM


def measure_errors(results, truth):
    """Return (error, size) of losses, gradient norms, evaluation, and every weight and moment."""
    differences = {}
    for key in ("losses", "norms"):
        actual, exact = (torch.tensor(getattr(r, key)) for r in (results[0], truth))
        differences[key] = actual - exact, exact
    exact = torch.tensor(truth.evaluation)
    differences["evaluation"] = torch.tensor(results[0].evaluation) - exact, exact
    for name in truth.weights:
        exact = truth.whole(name).double()
        actual = torch.full_like(exact, torch.nan)
        for result in results:
            for box, piece in result.weights.get(name, ()):
                actual[box.slices] = piece.double()
        differences[name] = actual - exact, exact
    return {
        name: (float(off.norm()), float(size.norm())) for name, (off, size) in differences.items()
    }


@pytest.mark.parametrize(("name", "ranks", "parallel", "recompute", "names"), CASES)
def test_a_step_by_kernels_is_as_exact_as_the_plain_one(
    name, ranks, parallel, recompute, names, pool, known
):
    arguments = make_arguments(name, parallel, recompute)
    results = pool.run(ranks, run_by_kernels, *arguments, FORCED)
    for _, names_run in results:
        assert names_run == names
    truth, allowed = known(name)
    for quantity, (error, size) in measure_errors([result for result, _ in results], truth).items():
        assert error <= allowed[quantity], (quantity, error, allowed[quantity], size)


def test_the_keys_are_those_of_the_library():
    from megaframe_kernels.registry import KERNELS

    assert {*FAMILIES, "matmul"} == set(Section.model_fields)
    for key, names in FAMILIES.items():
        (values,) = (Section.model_fields[key].annotation.__args__,)
        all_names = dict.fromkeys(n for name in names for n in KERNELS[name].list_names())
        assert set(values) == {"auto", *all_names}, key


@pytest.mark.parametrize(
    ("kernels", "train", "message"),
    [
        (
            {"elementwise": "triton"},
            {"precision": "fp64"},
            "kernels.elementwise: norm=triton cannot run here: .*64",
        ),
        ({"attention": "cudnn"}, {}, "kernels.attention: attention=cudnn cannot run here"),
        ({"update": "apex"}, {}, "kernels.update: adamw=apex cannot run here"),
    ],
)
def test_a_named_implementation_runs_or_is_an_error(kernels, train, message):
    if torch.cuda.is_available():
        pytest.skip("says of a machine without a GPU what it lacks")
    with pytest.raises(UserError, match=message):
        run(MODELS["llama"], {**TRAIN, **train}, kernels=kernels)
