"""New models of trained ones compute what they are said to: averages, other layers, more words."""

import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from slow_cases import slow
from tolerances import assert_near

import megaframe
from megaframe.architecture.model_blocks import find_block_config
from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.starting_weights import write_starting_weights
from megaframe.checkpoint.surgery import average_checkpoints, grow_vocabulary, select_layers
from megaframe.checkpoint.train_state import EMA_PREFIX, read_train_state
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.model.model_chunk import list_model_specs

SMALL = {"layers": 3, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 37}
MODELS = {
    "plain": {},
    "windows": {"window": [4, None], "mtp_depth": 1, "position": "learned"},
    "experts": {"moe": {"experts": 4, "ffn": 8, "first": 1}, "activation": "swiglu"},
    "blocks": {"blocks": [{"repeat": 2, "norms": "both"}, {"mixer": {"window": 4}}]},
}
TOKENS = torch.arange(20).view(2, 10)


def draw(specs, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        for spec in specs
    }


@pytest.fixture
def write(tmp_path):
    """write(**model) writes a model of random weights in fp64 and returns its open checkpoint."""
    with ExitStack() as opened:

        def make(seed=0, change=lambda name, value: value, *, ema=False, **model):
            config = RunConfig(model={**SMALL, **model}, train={"seq": 16, "precision": "fp64"})
            specs, values = list_model_specs(config.model, config.train), {}
            if ema:
                averages = [replace(spec, name=EMA_PREFIX + spec.name) for spec in specs]
                values = draw(averages, seed - 1)
                specs += averages
            values = {**draw(list_model_specs(config.model, config.train), seed), **values}
            changed = {name: change(name, value) for name, value in values.items()}
            folder = tmp_path / f"written-{len([*tmp_path.iterdir()])}"
            tensors = [(spec, "F64") for spec in specs]
            written = write_starting_weights(folder, config, "a test", tensors, changed.get)
            return opened.enter_context(open_checkpoint(written.checkpoint))

        yield make


def reopen(written):
    return open_checkpoint(written.checkpoint)


@pytest.mark.parametrize("weights", [None, [1.0, 1.0], [0.5, 1.5], [3.0, -1.0]])
def test_an_average_is_that_of_each_tensor(weights, write, tmp_path):
    first, second = write(0), write(1)
    share, other = (weight / sum(weights or [2.0]) for weight in weights or [1.0, 1.0])
    with reopen(average_checkpoints([first, second], tmp_path / "new", weights)) as new:
        assert new.step == 0 and new.tensors.keys() == first.tensors.keys()
        for name in new.tensors:
            expected = share * first.read_tensor(name) + other * second.read_tensor(name)
            assert_near(new.read_tensor(name), expected, 2)


def test_an_average_of_one_is_itself_and_a_config_beside_it_loads(write, tmp_path):
    checkpoint = write(**MODELS["experts"])
    written = average_checkpoints([checkpoint], tmp_path / "new")
    with reopen(written) as new:
        for name in checkpoint.tensors:
            assert torch.equal(new.read_tensor(name), checkpoint.read_tensor(name))
    config = megaframe.load_config(str(written.config_file))
    assert config.model == read_train_state(checkpoint).config.model
    assert config.checkpoint.weights == str(written.checkpoint)


def test_averages_over_steps_take_the_place_of_weights(write, tmp_path):
    checkpoint, averages = write(ema=True), write(seed=-1)
    with reopen(average_checkpoints([checkpoint], tmp_path / "new", ema=True)) as new:
        assert new.tensors.keys() == averages.tensors.keys()
        for name in new.tensors:
            assert torch.equal(new.read_tensor(name), averages.read_tensor(name))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 0, 1, 2], slow([1])], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_selected_layers_are_those_of_the_old_model(name, order, write, tmp_path):
    checkpoint = write(**MODELS[name])
    old = read_train_state(checkpoint).config.model
    written = select_layers(checkpoint, tmp_path / "new", order)
    with reopen(written) as new:
        model = read_train_state(new).config.model
        assert bool(written.notes) == (model.mtp_depth < old.mtp_depth)
        origins = [*order, *range(old.layers, old.layers + model.mtp_depth)]
        assert model.layers == len(order) and (model == old or order != [0, 1, 2])
        for layer, origin in enumerate(origins):
            before, after = find_block_config(old, origin), find_block_config(model, layer)
            assert after == before.model_copy(update={"repeat": after.repeat})
        for saved in new.tensors:
            origin = re.sub(
                r"blocks\.(\d+)", lambda match: f"blocks.{origins[int(match[1])]}", saved
            )
            assert torch.equal(new.read_tensor(saved), checkpoint.read_tensor(origin))


def test_without_a_layer_that_adds_nothing_a_model_computes_the_same(write, tmp_path):
    checkpoint = write(
        change=lambda name, value: value * ("blocks.1" not in name or "norm" in name)
    )
    written = select_layers(checkpoint, tmp_path / "new", [0, 2])
    with reopen(written) as new:
        assert len(new.tensors) < len(checkpoint.tensors)
    whole, fewer = (megaframe.load_model(path) for path in (checkpoint.path, written.checkpoint))
    assert torch.equal(whole.logits(TOKENS), fewer.logits(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_word_is_the_mean_of_the_others(tied, write, tmp_path):
    checkpoint = write(tie_embeddings=tied)
    written = grow_vocabulary(checkpoint, tmp_path / "new", 41)
    before, after = (
        megaframe.load_model(path).logits(TOKENS) for path in (checkpoint.path, written.checkpoint)
    )
    # Products of rows of other lengths may add in another order.
    assert_near(after[..., :37], before, 16)
    for word in range(37, 41):
        assert_near(after[..., word], before.mean(-1), 16 + 37)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda one, to: select_layers(one, to, [0, 3]), "3 is no layer of .* 0 to 2"),
        (lambda one, to: select_layers(one, to, []), "0 layers; give 1 to"),
        (lambda one, to: select_layers(one, to, [0] * 2001), "2001 layers; give 1 to 2000"),
        (lambda one, to: grow_vocabulary(one, to, 37), "vocab=37: .* of 37; give more"),
        (lambda one, to: average_checkpoints([one], to, [1.0, 2.0]), "1 2: give one finite number"),
        (lambda one, to: average_checkpoints([one, one], to, [1.0, -1.0]), "sum other than 0"),
        (lambda one, to: average_checkpoints([one], to, [float("nan")]), "nan: give one finite"),
        (lambda one, to: average_checkpoints([one], to, ema=True), "no averages of weights"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(act, message, write, tmp_path):
    with pytest.raises(UserError, match=message):
        act(write(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_models_that_differ_have_no_average(write, tmp_path):
    with pytest.raises(UserError, match=r"another model than .*\n  model.ffn: 24 there, 28 here"):
        average_checkpoints([write(), write(ffn=28)], tmp_path / "new")
    assert not (tmp_path / "new").exists()
