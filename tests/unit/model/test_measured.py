"""Descriptions that derive nothing by hand: what is measured of their layers is what closed forms
say, and another process finds it again."""

from dataclasses import dataclass

import pytest
import torch
from repo_copy import ROOT

from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.config import ModelConfig, ParallelConfig
from megaframe.config.registry import Registry, get_registry, use_registry
from megaframe.extensions import load_extensions
from megaframe.model.measured import (
    MeasuredActivation,
    MeasuredMixer,
    MeasuredNorm,
    fit_saved,
    measure,
)
from megaframe.model.measurement_cache import _digest_sources, _find_in_process
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Linear


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "megaframe" / "layers"
    forget()


def forget():
    """Forget what this process has measured."""
    _find_in_process.cache_clear()
    fit_saved.cache_clear()


@dataclass(frozen=True, kw_only=True)
class Scores(MeasuredMixer):
    """out = softmax(x x^T) v, of one head, with the scores of all pairs in memory."""

    hidden: int = 8
    fault: bool = False

    name = "scores"

    @property
    def parts(self):
        return {"value": LinearSpec((8,), (8,), 0.1)}

    def make_layer(self, name, run):
        return ScoresLayer(name, self, run)


class ScoresLayer(Module):
    def __init__(self, name, description, run):
        self.value, self.fault = Linear(f"{name}.value", description.parts["value"], run.tensor), 0
        if description.fault:
            raise ValueError("no such layer")

    def __call__(self, x, norm, context, state):
        value = self.value(x, state.deferred, norm)
        samples = context.batch, context.length, -1
        x, value = x.view(samples), value.view(samples)
        return (torch.softmax(x @ x.mT, -1) @ value).flatten(0, 1)


@pytest.mark.parametrize("seq", [64, 100, 1000])
def test_what_grows_with_pairs_of_tokens_is_kept_for_pairs(seq):
    """The layer keeps values and the softmax."""
    saved = Scores().count_saved(ParallelConfig(), "none")
    assert saved == SavedActivations(8, 0, 0, SavedActivations(1, 0, 0))
    assert saved.count_bytes(2, seq) == 2 * (8 + seq)
    products = Scores().list_batched_products(seq)
    assert sum(product.flops for product in products) == 4 * seq * seq * 8


def test_a_layer_that_cannot_be_measured_is_a_mistake_of_the_config():
    assert [*Scores().find_mistakes(ParallelConfig())] == []
    (mistake,) = Scores(fault=True).find_mistakes(ParallelConfig())
    assert "Scores (" in mistake and "ValueError: no such layer" in mistake


def test_another_process_finds_what_was_measured(cache):
    saved = Scores().count_saved(ParallelConfig(), "none")
    files = sorted(cache.iterdir())
    assert len(files) == 6  # two lengths in three precisions
    texts = [file.read_text() for file in files]
    forget()
    for file in files:
        file.write_text(file.read_text().replace('"saved_bytes":', '"saved_bytes":1'))
    assert Scores().count_saved(ParallelConfig(), "none") != saved, "the files are read"
    for damage in ("", "{}", texts[0][:-3], "[" * 10000):
        forget()
        for file in files:
            file.write_text(damage)
        assert Scores().count_saved(ParallelConfig(), "none") == saved
        assert [file.read_text() for file in files] == texts


def test_what_a_layer_s_file_imports_may_change_what_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "layer.py": "import torch\nfrom megaframe import config\ndef build():\n import helper",
        "helper.py": "from some_package import part",
        "some_package/part.py": "import helper\nWIDTH = 8",
        "some_package/other.py": "",
    }
    (tmp_path / "some_package").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def digest():
        _digest_sources.cache_clear()
        return _digest_sources(str(tmp_path / "layer.py"))

    first = digest()
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert (digest() != first) == (name != "some_package/other.py"), name
        first = digest()


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Scores().count_saved(ParallelConfig(), "none").values == 8


@dataclass(frozen=True)
class Tanh(MeasuredNorm):
    def declare_parameters(self, name):
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")

    def compute(self, x, gain):
        return torch.tanh(x) * gain


class Sine(MeasuredActivation):
    def compute(self, x):
        return torch.sin(x)


class Squashed(MeasuredActivation):
    gated = True

    def compute(self, gate, up):
        return torch.sigmoid(gate) * torch.tanh(up)


class Bounded(MeasuredActivation):
    def compute(self, x):
        return torch.tanh(x)


def test_norms_and_activations_keep_what_autograd_keeps():
    """Besides the input and the result."""
    assert Tanh(24).saved_statistics == SavedActivations(values=24)
    assert [part().count_saved() for part in (Sine, Squashed, Bounded)] == [0, 2, 0]
    assert issubclass(Tanh, NormDescription)


def test_linear_attention_keeps_computes_and_passes_what_its_formulas_say():
    model, length, width, heads = ModelConfig(hidden=64, heads=8), 256, 8, 8
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/gated_linear_attention.py'}]"])
        part = get_registry().parts["mixer", "gated_linear"](chunk=64)
        layer = part.describe(model, 0.02)
        elements = layer.parts["input"].results + layer.parts["output"].terms
        for parallel in ({}, {"tensor": 2}, {"context": 2}):
            saved = layer.count_saved(ParallelConfig(**parallel), "selective")
            assert saved == SavedActivations(elements)
        per_chunk = 2 * heads * (2 * 64 * 64 * width + 2 * 64 * width * width)
        assert sum(p.flops for p in layer.list_batched_products(length)) == per_chunk * 4
        assert layer.passed_elements == heads * (width**2 + 1)


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize(("dims", "chunk"), [((64, 128), 16), ((128, 64), 64)])
def test_the_widest_place_of_a_delta_net_is_within_a_sixth(rank, dims, chunk):
    mixer = {"kind": "gated_delta_net", "decay_rank": rank, "chunk": chunk}
    mixer |= {"key_heads": 8, "key_dim": dims[0], "value_dim": dims[1]}
    model = ModelConfig(layers=1, hidden=512, blocks=[{"mixer": mixer}])
    description, tokens = describe_block(model, 0).mixer, 512
    found = measure(description, model.hidden, ParallelConfig(), tokens)
    more = (found.backward_peak_bytes - found.saved_bytes) / (2 * 4 * tokens)
    assert 5 / 6 < more / description.widest < 7 / 6
