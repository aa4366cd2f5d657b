"""Attention over spans, against fp64."""

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, assert_close, check, deterministic, make_random, widen
from megaframe_kernels.attention import attention, launches
from megaframe_kernels.attention.attention import KERNEL
from megaframe_kernels.attention.launches import launch_backward, launch_forward
from megaframe_kernels.attention.spans import Spans, find_spans
from megaframe_kernels.device import capture_launches
from slow_cases import mark_slow, slow

NONE = (None, None, None)
"""Sinks, scale and softcap."""


@pytest.fixture(params=[8, 9])
def generation(request, monkeypatch):
    """Compute as for two generations of chips, of which the first multiplies values in the same
    visit as their scores, the second one visit later. A GPU computes as its own does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launches, "read_generation", lambda _: request.param)
    return request.param


def make_heads(queries, keys=None, batch=1, n=2, g=1, width=16, dtype=torch.float32, scale=1.0):
    keys = queries if keys is None else keys
    return (
        make_random(batch, queries, n, width, dtype=dtype, scale=scale).requires_grad_(),
        make_random(batch, keys, g, width, dtype=dtype, seed=1, scale=scale).requires_grad_(),
        make_random(batch, keys, g, width, dtype=dtype, seed=2).requires_grad_(),
    )


def hold(operands, spans, **options):
    """Compare with the reference in fp64. The longest sum is over all keys or queries and all
    heads."""
    length = max(spans.first.shape[1], spans.starts.shape[1]) * operands[0].shape[2]
    check(KERNEL, "triton", (*operands, spans), options, length, length, scale=0.5)


@pytest.mark.parametrize("dtype", mark_slow(DTYPES, except_for=[torch.bfloat16]))
def test_causal_with_grouped_heads(dtype, generation):
    tensors = make_heads(70, batch=2, n=4, g=2, dtype=dtype)
    hold(tensors, find_spans(2, 70, 70, DEVICE), need_lse=True)


def test_blocks_without_a_mask_and_windows(generation):
    # 130 tokens in blocks of 32: some blocks are seen as a whole, some in part, some not at all.
    hold(make_heads(130, n=1), find_spans(1, 130, 130, DEVICE))
    hold(make_heads(130, n=1), find_spans(1, 130, 130, DEVICE, window=40))
    hold(make_heads(67, n=1), find_spans(1, 67, 67, DEVICE, causal=False))


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents(causal, generation):
    documents = (make_random(2, 75, seed=4) > 1.2).cumsum(1)
    spans = find_spans(
        2, 75, 75, DEVICE, causal=causal, query_documents=documents, key_documents=documents
    )
    hold(make_heads(75, batch=2), spans)


@pytest.mark.parametrize("width", [24, 8, 96])
def test_widths_that_are_no_power_of_two(width):
    hold(make_heads(20, width=width), find_spans(1, 20, 20, DEVICE))


@pytest.mark.parametrize(
    ("softcap", "scale"), [(2.0, 0.7), slow(None, 0.7), (None, -0.7), slow(None, 0.0)]
)
def test_softcap_sinks_and_scale(softcap, scale, generation):
    tensors = make_heads(45, n=4, g=2)
    sinks = make_random(4, seed=9).requires_grad_()
    spans = find_spans(1, 45, 45, DEVICE, window=9)
    options = {"softcap": softcap, "scale": scale, "need_lse": True}
    length = 45 * 4

    class WithSinks:
        """Takes the sinks as a tensor argument, so that their gradient is compared too."""

        constant, compute_tolerance = KERNEL.constant, KERNEL.compute_tolerance

        @staticmethod
        def reference(q, k, v, s, **options):
            return attention.run_reference(q, k, v, spans, sinks_N=s, **options)

        class UnguardedImplementation:
            @staticmethod
            def refuses(*_, **__):
                return None

            @staticmethod
            def run(q, k, v, s, **options):
                return attention.run_triton(q, k, v, spans, sinks_N=s, **options)

        implementations = {"triton": UnguardedImplementation}  # noqa: RUF012

    # The gradient of a score is a difference of products of 16 numbers, each of size sqrt(16).
    check(WithSinks, "triton", (*tensors, sinks), options, length, length, scale=4.0)


@pytest.mark.parametrize(
    ("tensors", "by_head", "by_group"), [slow(0, 1, 1), (10, 10, 2), slow(16, 12, 4)]
)
def test_heads_that_start_one_after_the_other(tensors, by_head, by_group, monkeypatch):
    """In 2 samples there are 12 pairs of a head and a sample, and 6 of a group of 2 heads and a
    sample."""
    monkeypatch.setattr(launches, "_CACHED", tensors * 70 * 16 * 4)
    assert launches._count_together(12, make_heads(70)[1], 2) == by_head
    assert launches._count_together(6, make_heads(70)[0], 1 / 2) == by_group
    heads = make_heads(70, batch=2, n=6, g=3)
    hold(heads, find_spans(2, 70, 70, DEVICE), need_lse=True)


def test_queries_that_see_nothing_give_zero_and_get_no_gradient(generation):
    documents = torch.tensor([[0, 0, 3, 3, 5]])
    spans = find_spans(
        1, 5, 5, DEVICE, query_documents=documents, key_documents=torch.tensor([[0, 1, 3, 4, 4]])
    )
    tensors = make_heads(5)
    hold(tensors, spans)
    out, lse = attention.run_triton(*tensors, spans, need_lse=True)
    assert (out[0, 4] == 0).all() and (lse[0, :, 4] == -torch.inf).all()
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.isfinite(g).all() for g in gradients) and (gradients[0][0, 4] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 4), (3, 0), (33, 5)])
def test_odd_and_empty_sizes(queries, keys, generation):
    spans = find_spans(1, queries, keys, DEVICE, causal=False)
    tensors = make_heads(queries, keys)
    if keys:
        hold(tensors, spans)
    else:
        out, lse = attention.run_triton(*tensors, spans, need_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert [g.shape for g in gradients] == [x.shape for x in tensors]
        assert not gradients[0].any()


def test_large_scores_and_strided_heads(generation):
    fused = make_random(1, 40, 2, 4, 16, scale=20.0)
    tensors = tuple(fused[..., i, :].detach().requires_grad_() for i in (0, 1, 3))
    spans = find_spans(1, 40, 40, DEVICE)
    # The rounding error of a score of 10^4 is carried into the exponential.
    check(KERNEL, "triton", (*tensors, spans), {}, 40 * 1000**2, scale=50.0)


def test_what_is_no_key_adds_nothing_however_low_the_scores_are(generation):
    """All scores are about -300. A place of a block beyond the last key has a score of 0, which
    would give it a share of e^300 if it were not masked."""
    ones = torch.ones(1, 40, 2, 16)
    query, key = (
        sign * 8.7 * ones + make_random(1, 40, 2, 16, seed=8, scale=0.1) for sign in (1, -1)
    )
    tensors = (
        query.requires_grad_(),
        key.requires_grad_(),
        make_random(1, 40, 2, 16).requires_grad_(),
    )
    spans = find_spans(1, 40, 40, DEVICE, causal=False)
    check(KERNEL, "triton", (*tensors, spans), {}, 40 * 300**2, scale=50.0)


def test_a_ring_of_tiles_is_the_whole():
    """Keys come in two parts and queries in zigzag order. Outputs are merged by their log-sum-exp,
    and gradients are computed from the merged ones."""
    query, key, value = (x.detach() for x in make_heads(48, n=2, g=2))
    d_out = make_random(1, 48, 2, 16, seed=8)
    full_spans = find_spans(1, 48, 48, DEVICE, window=30)
    exact = [widen(x).requires_grad_() for x in (query, key, value)]
    expected, expected_lse = attention.run_reference(*exact, full_spans, need_lse=True)
    (truth,) = torch.autograd.grad(expected, exact[0], d_out.double())
    own_places = torch.cat((torch.arange(12), torch.arange(36, 48)))
    others = torch.arange(12, 36)
    results = []
    for keys in (own_places, others):
        spans = find_spans(1, 24, 24, DEVICE, window=30, query_places=own_places, key_places=keys)
        part = (query[:, own_places], key[:, keys], value[:, keys])
        results.append((spans, part, launch_forward(*part, *spans.tensors[:2], None, None, None)))
    lse = torch.stack([r[2][1] for r in results]).logsumexp(0)
    out = sum(
        o * (part_lse - lse).exp().transpose(1, 2)[..., None] for _, _, (o, part_lse) in results
    )
    length = 48 * 2
    assert_close(KERNEL, out, expected[:, own_places], length, "output", scale=0.5)
    assert_close(KERNEL, lse, expected_lse[:, :, own_places], length, "log-sum-exp", scale=0.5)
    d_query = 0
    for spans, part, _ in results:
        gradients = launch_backward(d_out[:, own_places], *part, out, lse, *spans.tensors, *NONE)
        d_query = d_query + gradients[0]
    assert_close(KERNEL, d_query, truth[:, own_places], length, "gradient", scale=0.5)


@pytest.mark.parametrize(
    ("dtype", "softcap"),
    [
        *((torch.float32, 1.5), (torch.bfloat16, None), (torch.float16, 1.5)),
        *(slow(torch.float32, None), slow(torch.bfloat16, 1.5), slow(torch.float16, None)),
    ],
)
def test_backward_of_a_tile(dtype, softcap):
    """The tile has the first of the keys that the outputs are over. Some queries see none of
    them."""
    query, key, value = (x.detach() for x in make_heads(40, batch=2, n=4, g=2, dtype=dtype))
    ends = find_spans(2, 40, 40, DEVICE).tensors[:2]
    out, lse = launch_forward(query, key, value, *ends, None, 0.25, softcap)
    d_out = make_random(*out.shape, dtype=dtype, seed=5)
    spans = find_spans(2, 40, 23, DEVICE, window=11)
    arguments = (d_out, query, key[:, :23], value[:, :23], out, lse, spans)
    options = {"scale": 0.25, "softcap": softcap}
    check(attention.BACKWARD, "triton", arguments, options, 40 * 4, scale=1.0)


def test_gradients_are_bitwise_repeatable():
    tensors, spans = make_heads(40, n=4, dtype=torch.bfloat16), find_spans(1, 40, 40, DEVICE)

    def gradients():
        out, _ = attention.run_triton(*tensors, spans)
        return torch.autograd.grad(out.float().square().sum(), tensors)

    for first, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, other)


def test_the_passes_of_backward():
    launches = []
    with capture_launches(launches.append, 90), torch.device("meta"):
        ends = torch.empty(1, 256, dtype=torch.int32)
        tensors = (torch.empty(1, 256, n, 64).bfloat16().requires_grad_() for n in (4, 2, 2))
        out, _ = attention.run_triton(*tensors, Spans(ends, ends, ends, ends))
        out.sum().backward()
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["forward", "prepare_backward", "backward_queries", "backward_keys"]


def test_blocks_of_queries_divide_what_is_kept_of_them():
    own_tables = launches.BACKWARD_QUERIES, launches.BACKWARD_KEYS
    tables = [table for tables in own_tables for table in tables.values()]
    blocks = [block for table in tables for block in table.values()]
    blocks += [launches.WIDE_NUMBERS, launches.WIDE_NUMBERS_OF_GRADIENTS]
    assert all(launches.PADDING % block.queries == 0 for block in blocks)


def test_torch_does_the_same():
    tensors, spans = make_heads(24, n=4, g=2), find_spans(1, 24, 24, DEVICE)
    check(KERNEL, "torch", (*tensors, spans), {}, 24 * 4, scale=0.5)
    reason = KERNEL.implementations["torch"].explain_refusal(
        *tensors, find_spans(1, 24, 24, DEVICE, window=3)
    )
    assert "window" in reason


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("name", "backend"), [("cudnn", "cudnn"), ("torch-flash", "flash")])
@pytest.mark.parametrize("mode", [False, True])
def test_a_backend_of_torch_takes_what_torch_says(name, backend, mode, monkeypatch):
    """Torch's check is replaced, because without CUDA it always says no."""
    parameters_asked = []

    def answer(params, debug):
        parameters_asked.append(params)
        return not torch.are_deterministic_algorithms_enabled()

    monkeypatch.setattr(torch._C, f"_can_use_{backend}_attention", answer)
    tensors = [
        x.as_subclass(OnGpu) for x in make_heads(24, batch=3, n=4, g=2, dtype=torch.bfloat16)
    ]
    with deterministic(mode):
        reason = KERNEL.implementations[name].refuses(*tensors, find_spans(3, 24, 24, DEVICE))
    assert (reason is not None) == mode
    (params,) = parameters_asked
    assert params.query.shape == (3, 4, 24, 16) and params.key.shape == (3, 2, 24, 16)
    assert params.is_causal and params.enable_gqa
