"""Every kernel of the library, and both sides of each of its switches, are reached by some config.

Kernels and switches are read from the code, and what is launched for several chips is noted during
steps of real runs; few of the kernels are computed, so their results mean nothing here. A kernel or
an argument that nothing passes would be code that every test proves and no run needs.
"""

import ast
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import get_args

import megaframe_kernels
import pytest
import torch
from megaframe_kernels.device import capture_launches
from megaframe_kernels.elementwise.activation import KINDS
from megaframe_kernels.experts import grouped_gradient, grouped_product
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import refuse_nothing
from megaframe_kernels.registry import KERNELS
from parity_runs import MODELS, run

from megaframe.config.parts import Activation
from megaframe.ops.kernel_dispatch import FAMILIES, Kernels

LIBRARY = Path(megaframe_kernels.__file__).parent
CHIPS = (80, 90, 100)
NARROW = {"layers": 1, "heads": 2, "head_dim": 8, "vocab": 16}
MOE = {**NARROW, "moe": {"experts": 4, "ffn": 16, "top_k": 2}}
SCORES = {"mixer": {"softcap": 1.0, "sinks": True}}
DELTA = {"kind": "gated_delta_net", "key_dim": 4, "key_heads": 1, "value_heads": 1, "value_dim": 4}
NF4, INT8 = {"block": 4, "absmax_block": 2}, {"type": "int8", "block": 4}
MAMBA = {"heads": 2, "head_dim": 4, "groups": 1, "state_dim": 4}
CONFIGS = {
    "gpt2, plain loss": ({**MODELS["gpt2"]}, {}, {}, {}),
    "gpt2, bf16, softcap, label smoothing": (
        {**MODELS["gpt2"], "logit_softcap": 3.0},
        {"precision": "bf16", "label_smoothing": 0.1},
        {},
        {},
    ),
    "llama, part of a head, adapters of nf4": (
        {**MODELS["llama"], "rotary_fraction": 0.5, "adapters": {"quantize_base": NF4}},
        *({}, {}, {}),
    ),
    "softcap and sinks, adapters of int8": (
        {**NARROW, "head_dim": 16, "blocks": [SCORES], "adapters": {"quantize_base": INT8}},
        *({}, {}, {}),
    ),
    "softcap on a ring": ({**NARROW, "blocks": [SCORES]}, {}, {"context": 2}, {}),
    "wide rows": (
        {**NARROW, "norm": "rmsnorm", "hidden": 8256, "ffn": 32},
        *({"precision": "bf16", "seq": 8}, {}, {}),
    ),
    "wide rows, layernorm": ({**NARROW, "hidden": 8256, "ffn": 32}, {"precision": "bf16"}, {}, {}),
    "experts, softmax": ({**MOE, "moe": {**MOE["moe"], "score": "softmax"}}, {}, {}, {}),
    "experts, one each": (
        *({**MOE, "moe": {**MOE["moe"], "top_k": 1, "balance": "none"}}, {}, {}, {}),
    ),
    "experts by torch": (MOE, {"precision": "bf16"}, {}, {"experts": "torch"}),
    "8 bits, tensor": (MOE, {"fp8": "tensor"}, {}, {}),
    "8 bits, row": (MOE, {"fp8": "row"}, {}, {}),
    "8 bits, row, wide": ({**NARROW, "ffn": 16400}, {"fp8": "row"}, {}, {}),
    "8 bits, block": (
        {**NARROW, "hidden": 128, "moe": {**MOE["moe"], "ffn": 256}},
        *({"fp8": "block", "seq": 4}, {}, {}),
    ),
    "chosen latents": (
        {
            **{**NARROW, "norm": "rmsnorm"},
            "latent": {
                **{"query_rank": 8, "kv_rank": 8, "value_dim": 8},
                **{"head_dim": 4, "rotary_dim": 4},
            },
            "indexer": {"heads": 4, "head_dim": 8, "top_k": 3, "loss": 0.1, "absorb": True},
        },
        *({}, {}, {}),
    ),
    "delta rule, Mamba-2": (
        {**NARROW, "blocks": [{"mixer": DELTA, "second_mixer": {"kind": "mamba2", **MAMBA}}]},
        *({}, {}, {}),
    ),
    "decays of channels on a ring": (
        {**NARROW, "blocks": [{"mixer": {**DELTA, "decay_rank": 3, "gate_rank": 4}}]},
        *({}, {"context": 2}, {}),
    ),
}
"""Of the model, the training, the layout and, where not all of them are Triton's, the kernels."""


ONE_SIDED = {("_step", "divisor"), ("_step", "skip")}
"""A run always divides its gradients and may skip a step."""


def is_switch(value):
    return value is None or isinstance(value, bool | torch.Tensor)


def note_launches(model, train, parallel, kernels):
    """Train one step for each chip; return the launched functions, the sides of their switches that
    were used (for a tensor, whether there is one), and the kernels that the run asked for."""
    sides, names, find = defaultdict(set), set(), Kernels.find

    def take(launched):
        place = f"{launched.kernel.fn.__module__}.{launched.kernel.fn.__name__}"
        values = dict(zip(launched.kernel.arg_names, launched.arguments, strict=False))
        for name, value in {**values, **launched.constants}.items():
            if is_switch(value):
                sides[place, name].add(value if isinstance(value, bool) else value is not None)
        # Torch reads by these results. All others may stay what the memory holds.
        if "expert_order" in place:
            launched.kernel[launched.grid](*launched.arguments, **launched.constants)
        if place.endswith("router._forward"):
            values["experts"].zero_()

    def watch(self, name, *arguments, **options):
        names.add(name)
        return find(self, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parity_runs.GLOBAL_BATCH", 2)
        patch.setattr("parity_runs.STEPS", 1)
        patch.setattr(Kernels, "find", watch)
        # torch has these products for CPUs too, but the library asks for a GPU.
        for kernel in (grouped_product.KERNEL, grouped_gradient.KERNEL):
            ask_nothing = {"explain_absence": require_nothing, "refuses": refuse_nothing}
            by_torch = replace(kernel.implementations["torch"], **ask_nothing)
            patch.setitem(kernel.implementations, "torch", by_torch)
        chosen = {**dict.fromkeys(FAMILIES, "triton"), **kernels}
        train = {"microbatch": 1, "precision": "fp32", "z_loss": 0.1, **train}
        for chip in CHIPS:
            with capture_launches(take, chip):
                run(model, train, parallel, False, False, False, None, chosen)
    return dict(sides), names


def list_functions():
    """Return the functions of the library that are launched: those that no other one calls. Each
    has the names of its arguments that may be missing."""
    functions, called = {}, set()
    for path in LIBRARY.rglob("*.py"):
        module = ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
            if any(decorator.startswith("triton.jit") for decorator in decorators):
                functions[f"{module}.{node.name}"] = {
                    ast.unparse(test.left)
                    for test in ast.walk(node)
                    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)
                }
                calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
                called |= {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    return {
        place: optional
        for place, optional in functions.items()
        if place.rpartition(".")[2] not in called
    }


def test_a_config_reaches_every_kernel_and_both_sides_of_its_switches(pool):
    sides, asked = defaultdict(set), set()
    for model, train, parallel, kernels in CONFIGS.values():
        ranks = parallel.get("context", 1)
        for some, names in pool.run(ranks, note_launches, model, train, parallel, kernels):
            asked |= names
            for switch, values in some.items():
                sides[switch] |= values
    assert asked == set(KERNELS) == {name for names in FAMILIES.values() for name in names}
    functions = list_functions()
    assert {place for place, _ in sides} == set(functions)
    switches = {switch for switch, values in sides.items() if switch[1].isupper() and values}
    switches |= {(place, name) for place, names in functions.items() for name in names}
    one_sided = {switch: sides[switch] for switch in switches if sides[switch] != {False, True}}
    assert {(place.rpartition(".")[2], name) for place, name in one_sided} == ONE_SIDED, one_sided


def test_a_config_names_every_activation_that_has_a_kernel():
    assert set(KINDS) <= set(get_args(Activation))
