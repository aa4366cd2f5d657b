"""One product of all experts is that of each of them, forward and backward, with experts that have
no rows."""

import pytest
import torch

from megaframe.nn.moe import experts


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_one_product_of_all_experts_is_the_loop_over_them(activation, build, make_microbatch):
    found = []
    for at_once in (False, True):
        moe = {"experts": 6, "ffn": 8, "top_k": 1, "normalise": False}
        model = {"moe": moe, "activation": activation, "layers": 1, "hidden": 16}
        built = build(
            model, train={"precision": "fp32", "seq": 4, "microbatch": 1, "global_batch": 1}
        )
        microbatch = make_microbatch(built.config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "grouped", lambda *_, at_once=at_once: at_once)
            built.optimizer.start_step()
            for number in range(2):  # the second adds to the sums of the first
                built.stage.forward(number, microbatch, 1.0)
                built.stage.backward(number)
        found.append({p.spec.name: p.grad.clone() for p in built.stage.parameters()})
        loads = next(load for name, load in found[-1].items() if "balance" in name)
        assert (loads == 0).any()
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-5, atol=1e-6)
    assert any("experts" in name and grad.any() for name, grad in found[1].items())
