"""Products in 8 bits: exact for numbers that the type represents, otherwise within its rounding;
the same under every layout whose shards are whole blocks; and good enough for training.
"""

import pytest
import torch
from parity_runs import FEW, assert_same, run
from slow_cases import slow

from megaframe.architecture.eight_bit_products import BLOCK
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.kernel_dispatch import NO_KERNELS
from megaframe.pipeline_parallel.stage_pass import StagePass

SCALINGS = ("tensor", "row", "block")
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 3.5, -2.0, 13.0, -104.0, 448.0])
"""Numbers that e4m3 represents. So does e5m2, except 13 and -104, which need 3 mantissa bits."""


def on_the_grid(rows, width, seed, grid=GRID):
    """Return random numbers of the grid. Each run of 128 has the largest, so scales are exact."""
    picks = torch.randint(
        0, len(grid), (rows, width), generator=torch.Generator().manual_seed(seed)
    )
    x = grid[picks]
    x[:, ::BLOCK] = 448.0
    return x.double()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(5, 128), (130, 256), (3, 40)])
def test_numbers_of_the_type_are_multiplied_exactly(scaling, matrix, rows, width):
    left, right = on_the_grid(rows, width, 0), on_the_grid(160, width, 1)
    eight = Fp8Matmul(scaling, NO_KERNELS)
    # Factors that are powers of two change only the scales.
    product = eight.multiply(left * 0.25, right * 8.0, gradient=False, matrix=matrix)
    assert torch.equal(product, 2.0 * left @ right.t())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_error_is_that_of_two_roundings(scaling, gradient):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 300, generator=generator, dtype=torch.float64) for n in (70, 48))
    product = Fp8Matmul(scaling, NO_KERNELS).multiply(left, right, gradient=gradient, matrix=False)
    e4m3, e5m2 = (2.0**-4, 2.0**-3)  # half a unit in the last place
    of_left = e5m2 if gradient and scaling == "tensor" else e4m3
    relative = (1 + of_left) * (1 + e4m3) - 1
    # Subnormal numbers are off by at most half of the smallest one: by 2^-10, on a scale of 448.
    least = 300 * 2 * 2.0**-10 / 448 * float(left.abs().max() * right.abs().max())
    assert (
        (product - left @ right.t()).abs() <= relative * left.abs() @ right.abs().t() + least
    ).all()
    assert (product != left @ right.t()).all()


class WatchedMatmul(Fp8Matmul):
    """Notes of which products sums may be kept in fewer bits."""

    def _find_kernel(self, name, *arguments):
        if name == "scaled_product":
            self.fast = [*getattr(self, "fast", []), arguments[-1]]
        return super()._find_kernel(name, *arguments)


def test_only_sums_of_the_forward_pass_may_be_kept_in_fewer_bits():
    eight, x = WatchedMatmul("row", NO_KERNELS), torch.ones(16, 16)
    eight.multiply(x, x, gradient=False, matrix=True)
    eight.multiply(x, x, gradient=True, matrix=True)
    eight.compute_weight_gradient(x, x)
    assert eight.fast == [True, False, False]


def test_rounding_is_that_of_quantisation_and_ties_go_to_even():
    eight = Fp8Matmul("row", NO_KERNELS)
    x = torch.full((1, 16), 0.0)
    x[0, :5] = torch.tensor([448.0, 17.0, 19.0, 1.0625, 1.1875])  # ties between grid numbers
    product = eight.multiply(x, torch.eye(16) * 448.0, gradient=False, matrix=False) / 448.0
    assert product[0, :5].tolist() == [448.0, 16.0, 20.0, 1.0, 1.25]


WIDE = {"hidden": 256, "heads": 2, "kv_heads": 2, "ffn": 256, "norm": "rmsnorm", "layers": 1}
MOE = {"experts": 4, "ffn": 128, "top_k": 2}


@pytest.mark.parametrize(
    ("scaling", "parallel", "extra"),
    [
        ("block", {"tensor": 2}, {}),
        slow("block", {"tensor": 2, "expert": 2}, {"moe": MOE}),
        ("row", {"data": 2, "zero": 2}, {"ffn": 64}),
        ("tensor", {"pipeline": 2}, {"layers": 2, "ffn": 64}),
    ],
)
def test_layouts_that_leave_scales_alone_do_not_change_the_answer(scaling, parallel, extra, pool):
    """A scale per tensor or row depends on which part a tensor rank has; a scale per block does not
    if shards are whole blocks."""
    model, train = {**WIDE, "activation": "swiglu", **extra}, {**FEW, "fp8": scaling}
    single = pool.run(1, run, model, train)[0]
    assert_same(pool.run(2, run, model, train, parallel), single)
    assert single.losses != pool.run(1, run, model, {**train, "fp8": "none"})[0].losses


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_learns_as_bf16_does(scaling, build):
    """On a language whose next token can be predicted, both losses fall equally fast."""
    finals = {}
    for fp8 in ("none", scaling):
        built = build(
            {"hidden": 128, "heads": 1, "ffn": 256, "vocab": 61, "init_std": 0.05, "layers": 1},
            train={"precision": "bf16", "fp8": fp8, "seq": 16, "microbatch": 8, "steps": 40},
            optim={"lr": 0.003, "warmup": 5},
        )
        finals[fp8] = learn(built, steps=40)
    start = 4.1  # log 61
    assert finals["none"] < 0.4 * start
    assert abs(finals[scaling] - finals["none"]) < 0.05 * start


def learn(built, steps):
    """Train on sequences that count in constant strides; return the mean loss of the last five
    steps."""
    from megaframe.data.microbatch import Microbatch

    generator, losses = torch.Generator().manual_seed(0), []
    scale = torch.tensor(1.0 / 128, dtype=torch.float64)
    for step in range(steps):
        start, by = torch.randint(0, 61, (2, 8, 1), generator=generator)
        words = (start + (1 + by % 4) * torch.arange(17)) % 61
        batch = Microbatch(words[:, :-1], words[:, 1:], torch.arange(8) + 8 * step)
        built.sharded_parameters.start_step()
        losses.append(float(built.stage.forward(StagePass(0, last=True), batch, scale)) / 128)
        built.stage.backward(StagePass(0, last=True))
        built.sharded_parameters.wait_for_gradients()
        built.optimizer.update()
    return sum(losses[-5:]) / 5
