"""One grouped product of all experts equals the products of each, forward and backward, also for
experts without rows and in 8 bits."""

import pytest
import torch
from tolerances import assert_near

from megaframe.model.layer_inputs import LayerRoutines
from megaframe.model.moe import experts
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.kernel_dispatch import NO_KERNELS
from megaframe.pipeline_parallel.stage_pass import StagePass

pytestmark = pytest.mark.numeric


def draw_biases(built):
    """Give biases, and B of adapters, which begin at 0, the same random values for every type of
    numbers."""
    generator = torch.Generator().manual_seed(0)
    for p in built.stage.parameters():
        if p.spec.role == "bias" or p.spec.name.endswith(".b.weight"):
            p.value.copy_(torch.randn(p.value.shape, generator=generator))


@pytest.mark.parametrize(
    ("activation", "bias", "adapters"),
    [
        *(("swiglu", True, None), ("geglu", False, None), ("swiglu_clamped", True, None)),
        *(("gelu", False, None), ("swiglu", True, {"rank": 4, "alpha": 6.0})),
    ],
)
def test_one_product_of_all_experts_is_the_loop_over_them(
    activation, bias, adapters, build, make_microbatch
):
    """The loop computes the truth in fp64, in which torch has no grouped product."""
    gradients = []
    for at_once, precision in ((False, "fp64"), (True, "fp32")):
        moe = {"experts": 6, "ffn": 8, "top_k": 1, "normalise": False, "expert_bias": bias}
        model = {"moe": moe, "activation": activation, "layers": 1, "hidden": 16}
        model["adapters"] = adapters
        train = {"precision": precision, "seq": 4, "microbatch": 1, "global_batch": 1}
        built = build(model, train=train)
        microbatch = make_microbatch(built.config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "can_group", lambda *_, at_once=at_once: at_once)
            draw_biases(built)
            built.sharded_parameters.start_step()
            for number in range(2):  # the second adds to the first one's gradients
                built.stage.forward(
                    StagePass(number), microbatch, torch.ones((), dtype=torch.float64)
                )
                built.stage.backward(StagePass(number))
        trained = (p for p in built.stage.parameters() if not p.frozen)
        gradients.append({p.spec.name: p.grad.clone() for p in trained})
        loads = (load for name, load in gradients[-1].items() if "balance" in name)
        assert adapters is not None or (next(loads) == 0).any()
    terms = 4 + 8 + 16 + 37  # tokens, inner width, hidden and vocabulary
    for name, expected in gradients[0].items():
        assert_near(gradients[1][name], expected, terms, label=name)
    assert any("experts" in name and grad.any() for name, grad in gradients[1].items())


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_copies_of_rows_change_no_gradient(activation, build, make_microbatch, monkeypatch):
    """Rows that are multiplied again, for numbers of rows that repeat, add exactly zero."""
    counts, multiply = [], experts._ExpertSlice.multiply

    def record(piece, x, matrix):
        counts.append(len(x))
        return multiply(piece, x, matrix)

    monkeypatch.setattr(experts._ExpertSlice, "multiply", record)
    results = []
    for multiple in (1, 8):
        routines = LayerRoutines(get_row_multiple=lambda x, multiple=multiple: multiple)
        moe = {"experts": 6, "ffn": 8, "top_k": 2, "expert_bias": True}
        model = {"moe": moe, "activation": activation, "layers": 2, "hidden": 16}
        built = build(model, routines, train={"precision": "fp64", "seq": 11, "microbatch": 1})
        microbatch = make_microbatch(built.config)
        draw_biases(built)
        built.sharded_parameters.start_step()
        counts.clear()
        for number in range(2):
            built.stage.forward(StagePass(number), microbatch, torch.ones((), dtype=torch.float64))
            built.stage.backward(StagePass(number))
        assert all(count % multiple == 0 for count in counts) and 0 not in counts
        if multiple == 1:
            assert any(count % 8 for count in counts)
        results.append({p.spec.name: p.grad.clone() for p in built.stage.parameters()})
    for name, expected in results[0].items():
        assert_near(results[1][name], expected, 11 + 16 + 37, label=name)
    assert all(grad.any() for name, grad in results[0].items() if "experts" in name)


def test_without_copies_the_gates_are_not_copied():
    """On a GPU that would be one more kernel forward and one backward."""
    gates = torch.ones(5)
    every = experts._ExpertSlice(None, slice(None), slice(None), torch.tensor([5]).int())
    assert every.select_gates(gates).data_ptr() == gates.data_ptr()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("counts", [(3, 0, 200, 129, 0), (0, 0), (40,)])
def test_in_8_bits_all_experts_at_once_are_each_alone(scaling, dtype, counts):
    """Both round alike: only the order of sums differs."""
    eight, generator = Fp8Matmul(scaling, NO_KERNELS), torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    width = 256 if scaling == "block" else 144  # 128 does not divide
    x, dy = random(sum(counts), 128), random(sum(counts), width)
    matrices, ends = random(len(counts), width, 128), torch.tensor(counts).cumsum(0).int()
    grouped = eight.multiply_grouped(x, matrices, ends)
    back = eight.compute_grouped_input_gradient(dy, matrices, ends)
    written, added = torch.ones(2, len(counts), 2, width // 2, 128, dtype=dtype)
    eight.compute_grouped_gradient(dy, x, ends, written, False)
    eight.compute_grouped_gradient(dy, x, ends, added, True)
    start = 0
    for matrix, count, first, second in zip(matrices, counts, written, added, strict=True):
        rows, grad = slice(start, start + count), torch.zeros(width, 128, dtype=dtype)
        start += count
        if count:
            expected = eight.multiply(x[rows], matrix, gradient=False, matrix=True)
            assert_near(grouped[rows], expected, 128)
            expected = eight.multiply(dy[rows], matrix.t(), gradient=True, matrix=True)
            assert_near(back[rows], expected, width)
            grad = eight.compute_weight_gradient(dy[rows], x[rows])
        assert_near(first.view(width, 128), grad, count)
        assert_near(second.view(width, 128), grad + 1.0, count + 1)
