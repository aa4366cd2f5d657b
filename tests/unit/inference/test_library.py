"""What `import megaframe` promises: the numbers of the commands, in a script or a notebook."""

import ast
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference_model
import torch
from bitwise import assert_same_losses
from entry_runs import read_losses, train
from tolerances import PROMISE, assert_within, promised

import megaframe
from megaframe.data.microbatch import Microbatch
from megaframe.inference.generation import allocate_parameters
from megaframe.pipeline_parallel.stage import build_whole_model

ROOT = Path(__file__).resolve().parents[3]


def draw_tokens(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def config(overrides):
    keys = overrides(train__steps=4, checkpoint__every=2)
    return megaframe.load_config(None, keys)


def test_importing_it_imports_nothing_else():
    code = "import sys, megaframe; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_name_is_there_documented_and_on_the_page():
    page = (ROOT / "docs/guides/library.md").read_text()
    for name in set(megaframe.__all__) - {"__version__"}:
        value = getattr(megaframe, name)
        assert inspect.getdoc(value) and value.__name__ == name and name in dir(megaframe)
        assert re.search(rf"^\| `{name}\b", page, re.MULTILINE), name
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        megaframe.absent  # noqa: B018


@pytest.mark.parametrize("page", ["README.md", "docs/guides/library.md"])
def test_code_on_pages_uses_what_is_promised(page):
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"megaframe": megaframe, "model": megaframe.Model}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), f"{page}: {ast.unparse(node)}"
    assert code


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_longer_side_of_a_matrix_is_contiguous_where_that_is_faster(config, precision):
    train = config.train.model_copy(update={"precision": precision})
    stage = build_whole_model(config.model_copy(update={"train": train}))
    wide = 0
    for part, parameter in zip(allocate_parameters(stage, "cpu"), stage.parameters(), strict=True):
        spec, value = parameter.spec, part.tensor
        outputs = len(spec.shape) - spec.inputs
        is_wide = math.prod(spec.shape[:outputs]) > math.prod(spec.shape[outputs:])
        is_turned = is_wide and spec.role in ("matrix", "head") and precision == "fp32"
        matrix = value.flatten(outputs).flatten(0, max(0, outputs - 1)) if is_turned else value
        assert value.shape == spec.shape and value.is_contiguous() != is_turned, spec.name
        assert not is_turned or matrix.t().is_contiguous(), spec.name
        wide += is_turned
    assert bool(wide) == (precision == "fp32")


def test_the_notebook_is_the_script():
    script = ast.parse((ROOT / "examples/library.py").read_text())
    notebook = json.loads((ROOT / "examples/library.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert ast.dump(ast.Module(script.body[1:], [])) == ast.dump(ast.parse(code))
    assert len(cells) > 5 and not any(cell["outputs"] for cell in cells)


def test_a_run_from_python_is_that_of_the_command_and_continues(config, overrides, tmp_path):
    megaframe.train(config)
    more = {"train.steps": 6, "checkpoint.resume": "latest"}
    megaframe.train(megaframe.load_config(tmp_path / "run/config.yaml", more))
    losses = read_losses(tmp_path / "run")
    command = [*overrides(checkpoint__every=2), f"run.dir={tmp_path / 'command'}"]
    train([*command, "train.steps=4"])
    train([*command, "train.steps=6", "checkpoint.resume=latest"])
    because = "the same config ran in the same way"
    assert_same_losses(losses, read_losses(tmp_path / "command"), because=because)


def test_logits_and_loss_are_those_of_the_reference(config):
    model, tokens = megaframe.build_model(config), draw_tokens(3, 12)
    microbatch = Microbatch(tokens[:, :-1], tokens[:, 1:], torch.arange(3))
    expected = reference_model.loss(dict(model.tensors), config, microbatch)
    assert float(model.loss(tokens)) == promised(float(expected))
    logits = model.logits(tokens)
    assert logits.shape == (3, 12, 61)
    of_next = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert float(of_next.mean()) == promised(float(expected))
    for part, same in (((1,), logits[1]), ((slice(None), slice(5)), logits[:, :5])):
        assert_within(model.logits(tokens[part]), same, PROMISE, "the promise")
    assert_within(model.logits(tokens[0].tolist()), logits[0], PROMISE, "the promise")


def test_a_changed_tensor_changes_what_the_model_computes(config):
    model, tokens = megaframe.build_model(config), draw_tokens(8)
    before = float(model.loss(tokens))
    model.tensors["head.norm.gain"].zero_()
    if "head.norm.bias" in model.tensors:
        model.tensors["head.norm.bias"].zero_()
    assert float(model.loss(tokens)) == promised(math.log(61)) != before


def test_a_model_of_any_layout_has_whole_tensors(pool, overrides, tmp_path):
    keys = {"train__steps": 1, "checkpoint__every": 1, "optim__lr": 1e-30}
    pool.run(2, train, overrides(**keys, parallel__tensor=2))
    loaded = megaframe.load_model(tmp_path / "run")
    built = megaframe.build_model(megaframe.load_config(tmp_path / "run/config.yaml"))
    assert loaded.tensors.keys() == built.tensors.keys()
    tokens = draw_tokens(2, 16)
    assert float(loaded.loss(tokens)) == promised(float(built.loss(tokens)))
    with megaframe.open_checkpoint(tmp_path / "run/checkpoints") as checkpoint:
        assert checkpoint.step == 1 and loaded.tensors.keys() <= checkpoint.tensors.keys()
        for name, value in built.tensors.items():
            assert_within(checkpoint.read_tensor(name), value, 0.0, "what is drawn is saved")
        nearest = "no tensor blocks.0.mlp.upp.weight; the nearest are blocks.0.mlp.up.weight or "
        with pytest.raises(megaframe.UserError, match=nearest):
            checkpoint.read_tensor("blocks.0.mlp.upp.weight")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([61], "token 0 is 61, but the model has ids 0 to 60"),
        ([[1, 2], [3, -1]], "token 3 is -1"),
        ([], r"tokens have shape \(0,\); give \[S\] or \[B, S\] with S of 1 or more"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        ([0.5], "tokens are torch.float32; token ids are whole numbers"),
    ],
)
def test_what_are_no_tokens_is_said(tokens, words, config):
    with pytest.raises(megaframe.UserError, match=words):
        megaframe.build_model(config).logits(tokens)


def test_a_single_token_has_no_loss(config):
    with pytest.raises(megaframe.UserError, match="S of 2 or more"):
        megaframe.build_model(config).loss([1])


def test_more_tokens_than_learned_positions_are_refused(overrides):
    learned = megaframe.load_config(None, overrides(model__position="learned"))
    with pytest.raises(megaframe.UserError, match="17 tokens: the model has learned 16 positions"):
        megaframe.build_model(learned).logits(draw_tokens(17))


def test_overrides_may_be_a_mapping(overrides):
    sources = [{"path": "a", "weight": 2.0}]
    keys = {"train.steps": 7, "data.sources": sources, "run.dir": "runs/x y", "model.vocab": 61}
    config = megaframe.load_config(None, keys)
    assert config.train.steps == 7 and config.run.dir == "runs/x y"
    assert config.data.sources[0].path == "a" and config.data.sources[0].weight == 2.0
    with pytest.raises(megaframe.UserError, match=r"train\.stepz"):
        megaframe.load_config(None, {"train.stepz": 7})
