"""Whole runs with an extension: resumed under another layout, and refused without it."""

import pytest
from entry_runs import read_losses, train
from repo_copy import ROOT
from tolerances import promised

from megaframe.config.registry import Registry, use_registry

RUN = {"optim__schedule": "constant", "checkpoint__every": 6}
PACKED = {"data__mask_eod": True, "data__reset_attention": True, "train__eval_every": 4}
NESTED = {"context": 4, "context_kind": "nested", "context_heads": 2}
EXTENSIONS = [str(ROOT / "examples" / name) for name in ("optimizer.py", "norm.py")]
PARTS = {
    "run__extensions": f"[{', '.join(EXTENSIONS)}]",
    "optim__name": "adabelief",
    "model__norm": "dynamic_tanh",
    "model__activation": "reglu",
    "model__blocks": "[{feed_forward: {kind: low_rank, rank: 6}}]",
}
"""An optimizer and layers from outside."""


def test_a_run_is_resumed_under_other_layouts_with_its_extensions_and_refused_without(
    pool, overrides, tmp_path, capsys
):
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **RUN, **PARTS))
    pool.run(2, train, overrides(train__steps=6, parallel__tensor=2, **RUN, **PARTS))
    resume = {**RUN, "checkpoint__resume": "latest"}
    with use_registry(Registry()), pytest.raises(SystemExit) as status:
        train(overrides(**resume))
    assert status.value.code == 2
    message = capsys.readouterr().err
    assert "2 extensions, of which 2 are not loaded here" in message
    assert f"run.extensions={PARTS['run__extensions']}" in message
    for steps, parallel in ((9, {"parallel__zero": 3}), (12, {"parallel__pipeline": 2})):
        keys = {**RUN, **PARTS, **parallel, "checkpoint__every": 3}
        pool.run(2, train, overrides(train__steps=steps, checkpoint__resume="latest", **keys))
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))


@pytest.mark.slow
def test_a_mixer_with_a_state_goes_on_under_other_layouts_on_documents(pool, overrides, tmp_path):
    """Ours; those of extensions are in checkpoints by the same declarations."""
    model = {"model__blocks": "[{mixer: gated_delta_net}, {mixer: attention}]", "model__heads": 4}
    keys = {**model, **RUN, **PACKED}
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **keys))
    nested = {f"parallel__{key}": value for key, value in NESTED.items()}
    pool.run(4, train, overrides(train__steps=6, **nested, **keys))
    resume = {**keys, "checkpoint__resume": "latest"}
    pool.run(4, train, overrides(parallel__tensor=2, parallel__zero=3, **resume))
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))


@pytest.mark.slow
def test_a_torch_module_goes_on_under_another_layout_on_documents(pool, overrides, tmp_path):
    """Its parameters and their optimizer state are in checkpoints like all others."""
    extension = {
        **{"run__extensions": f"[{ROOT / 'examples/torch_module.py'}]", **RUN, **PACKED},
        "model__blocks": "[{mixer: short_convolution}, {mixer: attention}]",
    }
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **extension))
    pool.run(2, train, overrides(train__steps=6, parallel__tensor=2, **extension))
    resume = {**extension, "checkpoint__resume": "latest"}
    pool.run(2, train, overrides(parallel__zero=3, **resume))
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))
