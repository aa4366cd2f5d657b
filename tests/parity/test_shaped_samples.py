"""A run on packed documents, whose middle comes last and of which a source is used up, is the same
under every layout, to 1e-10 in fp64, and goes on under another one. Samples have documents of many
lengths and end in padding, which context ranks divide in zigzag order, with a length that their
pieces do not divide.

Tests `megaframe.data.packed_dataset` and `megaframe.data.fill_in_the_middle`.
"""

import json

import numpy as np
import pytest
from entry_runs import make_trainer, read_lines
from slow_cases import slow
from token_files import write_token_file
from tolerances import promised

from megaframe.config import load

MODELS = {
    "dense": {"model__kv_heads": 1, "model__mtp_depth": 1},
    "experts": {"model__moe": "{experts: 4, top_k: 2, ffn: 8, balance_rate: 0.01}"},
}
NESTED = {"context": 4, "context_kind": "nested", "context_heads": 2}
RING = {"context": 2}
OTHERS = {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}
END = 56


def train(overrides):
    trainer = make_trainer(load(None, overrides))
    trainer.run()
    trainer.mesh.close()


def write_texts(folder):
    """Write two sources of documents of 3 to 30 tokens, some with weights; return them as JSON."""
    draw = np.random.default_rng(5)
    texts = {
        name: [[[*draw.integers(0, 56, draw.integers(2, 30)).tolist(), END]] for _ in range(count)]
        for name, count in (("code", 40), ("chat", 60))
    }
    for name, documents in texts.items():
        write_token_file(folder / name, documents)
    weights = [[draw.integers(0, 3, len(text)).tolist()] for (text,) in texts["chat"]]
    write_token_file(folder / "chat.weights", weights, "f4")
    fim = {"rate": 0.6, "prefix": 57, "suffix": 58, "middle": 59}
    code = {"path": str(folder / "code"), "fim": fim, "max_tokens": 100}
    return json.dumps([code, {"path": str(folder / "chat"), "weight": 2}])


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [("dense", NESTED, RING), slow("dense", RING, OTHERS), slow("experts", OTHERS, RING)],
)
def test_layouts_do_not_change_the_answer(model, first, second, pool, overrides, tmp_path):
    sources, metrics = write_texts(tmp_path), {}
    for name, parts in {"one": [(1, {})], "many": [(4, first), (4, second)]}.items():
        for steps, (ranks, parallel) in zip((3, 5)[-len(parts) :], parts, strict=True):
            keys = overrides(
                run__dir=tmp_path / name,
                train__seq=29,
                train__steps=steps,
                train__global_batch=4,
                train__microbatch=2,
                train__eval_every=5,
                optim__schedule="constant",
                checkpoint__every=3,
                checkpoint__resume="latest",
                data__sources=sources,
                data__packing="best_fit",
                data__reset_attention=True,
                data__reset_positions=True,
                data__document_ends=END,
                **MODELS[model],
                **{f"parallel__{key}": value for key, value in parallel.items()},
            )
            pool.run(ranks, train, keys)
        metrics[name] = read_lines(tmp_path / name)
    assert [line["sources"] for line in metrics["one"]][-2:] == [[3, 13], [3, 17]]
    for single, many in zip(metrics["one"], metrics["many"], strict=True):
        for key in single.keys() & {"loss", "grad_norm", "eval_loss", "tokens", "sources"}:
            if key != "sources":
                assert many[key] == promised(single[key])
            else:
                assert many[key] == single[key]
