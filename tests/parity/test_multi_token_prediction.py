"""Multi-token prediction gives the one-process answer to 1e-10 in fp64 under every kind of layout.
The end of the model needs embeddings from a table that another stage may own, and tokens further
ahead that another context rank may have.
"""

import json

import pytest
import torch
from entry_runs import make_trainer
from parity_runs import make_layout_check
from slow_cases import mark_slow
from tolerances import promised

from megaframe.config import load
from megaframe.data.microbatch import IGNORE, Microbatch, look_ahead, select_context_part

LATENT = {"query_rank": 12, "kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
SHAPES = {
    "tied": {"mtp_depth": 2, "position": "learned", "tie_embeddings": True, "dropout": 0.1},
    "packed": {
        **{"mtp_depth": 1, "norm": "rmsnorm", "activation": "swiglu", "latent": LATENT},
        "window": (2, None, 4),
    },
}
RING = (4, {"context": 2, "context_kind": "ring", "tensor": 2, "tensor_chunks": 2}, "selective")
ZB_V = (4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "zero": 2}, "none")
LAYOUTS = [
    (4, {"tensor": 2, "data": 2, "zero": 3}, "full"),
    RING,
    (4, {"context": 4, "context_kind": "all_to_all"}, "none"),
    (4, {"pipeline": 2, "tensor": 2, "zero": 1}, "none"),
    (4, {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "zero": 3}, "full"),
    ZB_V,
    (4, {"pipeline": 2, "schedule": "zb-h1", "context": 2, "layers_per_stage": (4, 0)}, "none"),
]
# The table of embeddings on another stage; and tokens further ahead on another context rank.
QUICK = [("tied", *ZB_V), ("packed", *RING)]
IN_TURN = [(list(SHAPES)[i % 2], *layout) for i, layout in enumerate(LAYOUTS)]
CASES = [*QUICK, *(case for case in IN_TURN if case not in QUICK)]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "recompute"), mark_slow(CASES, except_for=QUICK)
)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, check_layout):
    check_layout(name, ranks, parallel, recompute=recompute)


def test_what_is_ahead_ends_with_the_document_and_the_sample():
    tokens = torch.arange(1, 7)[None]
    labels = torch.tensor([[2, 3, 4, 5, IGNORE, 7]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    microbatch = Microbatch(tokens, labels, torch.arange(1))
    (first, of_one, _), (two, of_two, _) = look_ahead(microbatch, 2).ahead
    assert first.tolist() == [[2, 3, 4, 5, 6, 0]] and two.tolist() == [[3, 4, 5, 6, 0, 0]]
    assert of_one.tolist() == [[3, 4, 5, IGNORE, 7, IGNORE]]
    assert of_two.tolist() == [[4, 5, IGNORE, 7, IGNORE, IGNORE]]
    packed = Microbatch(tokens, labels, torch.arange(1), documents_BS=documents)
    (_, of_one, _), (_, of_two, _) = look_ahead(packed, 2).ahead
    assert of_one.tolist() == [[3, 4, IGNORE, IGNORE, 7, IGNORE]]
    assert of_two.tolist() == [[4, IGNORE, IGNORE, 7, IGNORE, IGNORE]]
    assert look_ahead(microbatch, 9).ahead[8][1].tolist() == [[IGNORE] * 6]


def test_parts_of_a_sample_are_ahead_of_themselves_as_the_whole_is():
    tokens = torch.arange(8)[None]
    full = look_ahead(Microbatch(tokens, tokens + 1, torch.arange(1)), 1)
    part = select_context_part(full, 0, 2)
    assert part.tokens_BS.tolist() == [[0, 1, 6, 7]]
    assert [x.tolist() for x in part.ahead[0][:2]] == [[[1, 2, 7, 0]], [[2, 3, 8, IGNORE]]]


def train(overrides):
    """Run the trainer on this rank, from the config to the metrics."""
    trainer = make_trainer(load(None, overrides))
    trainer.run()
    trainer.mesh.close()


@pytest.mark.slow
def test_a_run_is_the_same_and_goes_on_under_other_layouts(pool, overrides, tmp_path):
    """Compares metrics with those of a run that another layout resumes. An evaluation is of the
    next token alone: the same weights without predictors give the same loss."""
    first, second = {"parallel__pipeline": 2}, {"parallel__context": 2, "parallel__zero": 3}
    second |= {"checkpoint__resume": "latest"}
    metrics = {}
    for name, parts in {"one": [(1, {})], "many": [(4, first), (4, second)]}.items():
        for steps, (ranks, parallel) in zip((4, 6)[-len(parts) :], parts, strict=True):
            keys = overrides(
                run__dir=tmp_path / name,
                model__mtp_depth=2,
                train__steps=steps,
                train__eval_every=3,
                train__eval_samples=8,
                optim__schedule="constant",
                checkpoint__every=4,
                data__reset_attention=True,
                **parallel,
            )
            pool.run(ranks, train, keys)
        records = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        metrics[name] = [json.loads(line) for line in records]
    assert len(metrics["one"]) == 6
    for single, many in zip(metrics["one"], metrics["many"], strict=True):
        assert single["mtp_loss"] > 0
        for key in single.keys() & {"loss", "mtp_loss", "grad_norm", "eval_loss"}:
            if key in many:
                assert many[key] == promised(single[key])
