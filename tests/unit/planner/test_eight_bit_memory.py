"""Memory of products in 8 bits (`planner.local_products`): what `ops.fp8` makes, and what the peak
of a run on a GPU shows.

Tests `megaframe.architecture.eight_bit_products`.
"""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from megaframe.architecture.model_blocks import describe_block
from megaframe.config import RunConfig, load
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.ops.fp8 import SCALINGS, Fp8Matmul
from megaframe.ops.kernel_dispatch import NO_KERNELS
from megaframe.planner.candidates import Candidates, SearchSpace
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.local_products import (
    ProductSizes,
    compute_eight_bit_bytes,
    compute_grouped_copies,
)
from megaframe.planner.prediction import predict
from megaframe.planner.vectorized import estimate
from megaframe.schedule import NAMED_SCHEDULES

ROOT = Path(__file__).resolve().parents[3]
H100, H200 = load_cluster("h100-ib"), load_cluster("h200-ib")
SCHEDULES = [*NAMED_SCHEDULES]


class CountEightBits(TorchFunctionMode):
    """Counts the bytes of all tensors in 8 bits that exist at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else ():
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


def count(function, *arguments, **options):
    with CountEightBits() as counter:
        function(*arguments, **options)
    return counter.most


def make_config(fp8, model=None, **parallel):
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "tie_embeddings": False}
    return RunConfig.model_validate(
        {
            "model": {**sizes, **(model or {})},
            "train": {"seq": 128, "microbatch": 3, "global_batch": 48, "fp8": fp8},
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_copies_of_a_product_are_planned_as_they_are_made(scaling):
    config, tokens, eight = make_config(scaling), 3 * 128, Fp8Matmul(scaling, NO_KERNELS)
    most = 0
    for linear in describe_block(config.model, 0).linears:
        outputs, inputs = linear.results, linear.terms
        x, dy, matrix = (
            torch.ones(size) for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        copies = max(
            count(eight.multiply, dy, matrix.t(), gradient=True, matrix=True),
            count(eight.compute_weight_gradient, dy, x) + 2 * outputs * inputs,
        )
        # Rows and results of a forward pass are kept activations.
        assert count(eight.multiply, x, matrix, gradient=False, matrix=True) <= copies
        most = max(most, copies + 2 * tokens * (outputs + inputs))
    planned = compute_eight_bit_bytes(config.model, config.train, ProductSizes(1, 1, 1, 1, 3))
    most_for_scales = {"tensor": 1 + 8 / most, "row": 1.01, "block": 1.05}[scaling]
    assert most < planned <= most_for_scales * most


@pytest.mark.parametrize("scaling", SCALINGS)
def test_copies_of_all_experts_are_between_their_numbers_and_what_the_reference_makes(scaling):
    """The reference quantises each expert apart and joins the parts; kernels leave gaps."""
    experts, rows, wide, narrow = 2, 384, 512, 256
    eight, ends = Fp8Matmul(scaling, NO_KERNELS), torch.tensor([128, 384], dtype=torch.int32)
    x, dy = torch.ones(rows, narrow), torch.ones(rows, wide)
    matrices, grads = (torch.ones(experts, wide, narrow) for _ in range(2))
    planned = compute_grouped_copies(scaling, 0, experts, rows / experts, wide, narrow)
    least = max(rows * wide + matrices.numel(), rows * (wide + narrow))
    most = max(
        count(eight.compute_grouped_input_gradient, dy, matrices, ends),
        count(eight.compute_grouped_gradient, dy, x, ends, grads, False),
    )
    assert least < planned <= 1.01 * most


@pytest.mark.parametrize(
    "model",
    [
        {"ffn": 4096},
        {"moe": {"experts": 8, "ffn": 512}},
    ],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_estimates_of_many_add_what_the_plan_of_one_adds(model, scaling):
    def compute(fp8, tensor, data, expert):
        config = make_config(fp8, model, tensor=tensor, expert=expert, zero=1)
        layout = Layout.from_parallel(config.parallel, tensor * data)
        exact = predict(config, layout, H100, get_cluster_constants(H100)).memory_bytes
        row = (tensor, 1, 1, 1, data, 1, expert, 1, 1, 0, 3, SCHEDULES.index("1f1b"))
        space = SearchSpace(config, tensor * data, H100)
        many = estimate(space, get_cluster_constants(H100), Candidates(*np.array([row]).T))
        return sum(exact.values()), many.memory_bytes[0]

    experts = 4 if "moe" in model else 1
    for layout in ((1, 4, experts), (2, 8, experts)):
        exact, estimated = (
            eight - plain
            for eight, plain in zip(
                compute(scaling, *layout), compute("none", *layout), strict=True
            )
        )
        assert exact > 100_000
        assert estimated == pytest.approx(exact, rel=1e-3)


def test_widths_that_are_not_multiplied_in_8_bits_take_nothing():
    odd = make_config("block", {"hidden": 192, "heads": 3, "ffn": 320})
    assert compute_eight_bit_bytes(odd.model, odd.train, ProductSizes(1, 1, 1, 1, 3)) == 0
    even = make_config("row", {"hidden": 192, "heads": 3, "ffn": 320})
    assert compute_eight_bit_bytes(even.model, even.train, ProductSizes(1, 1, 1, 1, 3)) > 0


def test_a_peak_on_a_gpu_grew_by_as_little_as_planned():
    """Copies are gone when the next product runs, and other tensors need more at another time."""
    measured, planned = [], []
    for name, row in (("slice", "llama-8b-slice"), ("fp8", "llama-8b-slice-fp8")):
        results = json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())
        (run,) = (run["ours"] for run in results["training"] if run["row"] == row)
        measured.append(run["memory_bytes"])
        config = load(str(ROOT / f"configs/bench/{row}.yaml"), ())
        layout = Layout.from_parallel(config.parallel, 1)
        memory = predict(config, layout, H200, get_cluster_constants(H200)).memory_bytes
        planned.append(sum(memory.values()) - memory["overhead"])
    grown, more = (eight - plain for plain, eight in (measured, planned))
    assert abs(more - grown) < 0.001 * measured[0]
    assert planned == pytest.approx(measured, rel=0.05)
