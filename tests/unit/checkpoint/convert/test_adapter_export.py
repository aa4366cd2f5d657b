"""Adapters beside peft: it loads what is exported onto the exported base, computes the same logits,
and trains as a run does: equal losses and gradient norms on identical batches in fp64.

Tests `megaframe.checkpoint.convert.huggingface.adapter_export` and
`megaframe.checkpoint.convert.huggingface.adapter_import`.
"""

import json

import peft
import pytest
import torch
from slow_cases import slow
from tolerances import assert_near

from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.spec import Box, iterate_row_major_runs
from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface.adapter_export import export_adapters
from megaframe.checkpoint.convert.huggingface.adapter_import import arrange_rows, read_adapters
from megaframe.checkpoint.convert.huggingface.model_folder import export_model
from megaframe.checkpoint.convert.huggingface.tensors import TensorPart
from megaframe.checkpoint.manifest import DTYPE_NAMES
from megaframe.checkpoint.merged_adapters import open_model
from megaframe.checkpoint.starting_weights import write_starting_weights
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.model.model_chunk import list_model_specs
from megaframe.parameters.initialization import fill_initial_values
from megaframe.training.initialize_from import load_adapters
from megaframe.training.layer_check.parity import make_global_batch
from megaframe.training.train_step import TrainStep

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, "bias": False}
TRAIN = {"seq": 12, "global_batch": 4, "microbatch": 2, "precision": "fp64", "steps": 9}
OPTIM = {"lr": 0.02, "schedule": "constant", "weight_decay": 0.1, "clip": 0.5, "eps": 1e-6}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "head_dim": 4, "ffn": 24}
MODELS = {
    "llama": LLAMA,
    # Queries, keys and values are one matrix of theirs, and gates and inner widths another.
    "phi3": LLAMA,
    # Matrices are transposed.
    "gpt2": {
        **{"position": "learned", "bias": True, "tie_embeddings": True},
        "activation": "gelu_tanh",
    },
    "gpt_neox": {"bias": True, "activation": "gelu", "rotary_fraction": 0.5},
}
ADAPTERS = {"rank": 3, "alpha": 6.0}
DORA = {**ADAPTERS, "dora": True}
SUMS = 2 * 6 * (16 + 12) + 37


def make_config(name, adapters=None):
    model = {**SIZES, **MODELS[name], "family": name}
    if adapters is not None:
        model["adapters"] = adapters
    return RunConfig(model=model, train=TRAIN, optim=OPTIM)


def write_checkpoint(config, folder, trained=False, known=()):
    """Write a checkpoint of initial values; `trained`: those of all B are drawn as well."""

    def read(name):
        spec = specs[name]
        values = torch.empty(spec.shape, dtype=torch.float64)
        fill_initial_values(values, spec, Box((0,) * len(spec.shape), spec.shape), 1)
        if name in known:  # an A of a lower rank leaves its other rows
            values[: len(known[name])] = known[name]
        if trained and name.endswith((".b.weight", ".magnitude")):
            generator = torch.Generator().manual_seed(len(name) + values.numel())
            values.normal_(0.0, 0.3, generator=generator)
        return values

    specs = {spec.name: spec for spec in list_model_specs(config.model, config.train)}
    tensors = [(spec, DTYPE_NAMES[torch.float64]) for spec in specs.values()]
    return write_starting_weights(folder, config, "a test", tensors, read).checkpoint


def load_peft(name, adapters, folder, trained, **options):
    """Return the model of peft, of an exported base with exported adapters, and the checkpoint."""
    from transformers import AutoModelForCausalLM

    base = write_checkpoint(make_config(name), folder / "base")
    path = write_checkpoint(make_config(name, adapters), folder / "adapted", trained)
    with open_checkpoint(base) as checkpoint:
        export_model(checkpoint, folder / "hf", tokenizer="none")
    with open_checkpoint(path) as checkpoint:
        export_adapters(checkpoint, folder / "peft", base=str(folder / "hf"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
    return peft.PeftModel.from_pretrained(model, str(folder / "peft"), **options), path


def get_logits(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "targets", "kind"),
    [
        ("llama", ["*"], ADAPTERS),
        ("phi3", ["*"], ADAPTERS),
        slow("gpt2", ["*"], ADAPTERS),
        slow("gpt_neox", ["*"], ADAPTERS),
        slow("llama", ["query", "mlp.down"], ADAPTERS),
        slow("phi3", ["value", "gate"], ADAPTERS),
        slow("gpt_neox", ["key", "attention.output"], ADAPTERS),
        ("phi3", ["value", "gate", "mlp.down"], DORA),
        slow("gpt2", ["*"], DORA),
        slow("gpt_neox", ["*"], DORA),
    ],
)
def test_peft_computes_the_same(name, targets, kind, tmp_path):
    from transformers import AutoModelForCausalLM

    adapters = {**kind, "targets": targets}
    adapted, path = load_peft(name, adapters, tmp_path, trained=True)
    with open_model(path) as merged:
        export_model(merged, tmp_path / "merged", tokenizer="none")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = get_logits(merged, tokens), get_logits(adapted, tokens)
        base = get_logits(adapted.unload(), tokens)
    assert_near(theirs, ours, SUMS, size=float(ours.abs().max()))
    assert float((theirs - base).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("name", "targets", "kind", "distance"),
    [
        # Not where several of our matrices are one of theirs, whose B peft would train as a whole.
        ("gpt2", ["attention.output", "mlp.*"], ADAPTERS, 1e-10),
        ("gpt2", ["attention.output", "mlp.*"], DORA, 1e-10),
        # In any precision transformers computes rotations and statistics of RMSNorm in fp32.
        slow("llama", ["*"], ADAPTERS, 1e-6),
        slow("llama", ["*"], DORA, 1e-6),
    ],
)
def test_peft_trains_the_same(name, targets, kind, distance, tmp_path):
    """Four steps of AdamW with clipping, all of whose losses and norms are equal."""
    adapters = {**kind, "targets": targets}
    theirs, _ = load_peft(name, adapters, tmp_path, trained=False, is_trainable=True)
    config = make_config(name, adapters)
    train_step = TrainStep(config, Mesh(Layout(), device="cpu"))
    train_step.optimizer.initialize(1)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    betas, decay = (config.optim.beta1, config.optim.beta2), config.optim.weight_decay
    options = {"lr": config.optim.lr, "betas": betas, "eps": config.optim.eps}
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    matrices = [parameter for parameter in trained if parameter.dim() == 2]
    groups = [{"params": matrices}, *([{"params": vectors, "weight_decay": 0.0}] * bool(vectors))]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay, **options)
    losses = []
    for step in range(4):
        batch = make_global_batch(config.model, config.train, step)
        valid = float(batch.sum_label_weights())
        halves = [
            Microbatch(batch.tokens_BS[rows], batch.labels_BS[rows], batch.samples_B[rows])
            for rows in (slice(0, 2), slice(2, 4))
        ]
        result = train_step.train(halves, step, 1.0 / valid)
        logits = get_logits(theirs, batch.tokens_BS)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])
        for parameter in trained:  # `clip_grad_norm_` adds 1e-6 to the norm
            parameter.grad *= min(1.0, config.optim.clip / float(norm))
        optimizer.step()
        losses.append(float(loss))
        assert float(result.loss) / valid == pytest.approx(float(loss), abs=distance)
        assert float(result.update.grad_norm) == pytest.approx(float(norm), abs=distance)
    assert abs(losses[-1] - losses[0]) > 1e-3


def test_what_peft_has_no_place_for_is_refused(tmp_path):
    plain = write_checkpoint(make_config("llama"), tmp_path / "plain")
    with open_checkpoint(plain) as checkpoint, pytest.raises(UserError, match="has no adapters"):
        export_adapters(checkpoint, tmp_path / "out")
    moe = {**SIZES, **LLAMA, "moe": {"experts": 4, "ffn": 8, "score": "softmax"}}
    config = RunConfig(model={**moe, "adapters": ADAPTERS, "family": "mixtral"}, train=TRAIN)
    path = write_checkpoint(config, tmp_path / "moe")
    with open_checkpoint(path) as checkpoint, pytest.raises(UserError, match=r"of experts \("):
        export_adapters(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("phi3", DORA), slow("llama", ADAPTERS), slow("gpt2", ADAPTERS), slow("gpt_neox", ADAPTERS)],
)
def test_what_was_exported_is_read_back(name, kind, tmp_path):
    """Also of a matrix that stacks several of ours, whose rank is the sum of theirs."""
    adapters = {**kind, "targets": ["*"]}
    path = write_checkpoint(make_config(name, adapters), tmp_path / "run", trained=True)
    with open_checkpoint(path) as checkpoint:
        export_adapters(checkpoint, tmp_path / "peft")
        config = make_config(name, adapters)
        values = read_adapters(tmp_path / "peft", config.model, config.train, checkpoint)
        assert set(values) == {n for n in checkpoint.tensors if ".adapters." in n}
        for factor, tensor in values.items():
            saved = checkpoint.read_tensor(factor)
            if factor.endswith(".magnitude"):  # less the norms that they were added to
                assert_near(tensor, saved, SUMS, label=factor)
            else:
                assert tensor.equal(saved), factor


RANKS = {"rank_pattern": {"down_proj": 2, "^model.layers.1.self_attn.o_proj": 5}}
RANKS["alpha_pattern"] = {r"layers\.[01]\.mlp\..*": 4, "o_proj|nothing": 7}


@pytest.mark.parametrize(
    ("name", "dora", "patterns"),
    [
        ("phi3", True, RANKS),
        slow("phi3", True, {}),
        slow("phi3", False, {}),
        slow("llama", False, {}),
        slow("llama", False, RANKS),
    ],
)
def test_adapters_that_peft_made_compute_the_same(name, dora, patterns, tmp_path):
    """Also where one matrix of theirs is several of ours, which get an adapter each, and where
    modules have ranks and scales of their own."""
    from transformers import AutoModelForCausalLM

    base = write_checkpoint(make_config(name), tmp_path / "base")
    with open_checkpoint(base) as checkpoint:
        export_model(checkpoint, tmp_path / "hf", tokenizer="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    settings = {"use_rslora": True, "target_modules": "all-linear", "init_lora_weights": False}
    settings |= {"r": 3, "lora_alpha": 2, "use_dora": dora, **patterns}
    theirs = peft.get_peft_model(model, peft.LoraConfig(**settings))
    theirs.save_pretrained(tmp_path / "peft")
    rank = 5 if patterns else 3
    adapters = {"rank": rank, "alpha": 2 * 3**0.5 * rank / 3, "dora": dora}
    config = make_config(name, adapters)
    with open_checkpoint(base) as checkpoint:
        values = read_adapters(tmp_path / "peft", config.model, config.train, checkpoint)
        check_pieces(config, tmp_path / "peft", values, checkpoint)
        if name == "phi3":  # whose queries, keys and values are one matrix
            few = make_config(name, {**adapters, "targets": ["query", "output", "mlp.*"]})
            with pytest.raises(UserError, match="lora_B has 8 rows that add to matrices of blocks"):
                read_adapters(tmp_path / "peft", few.model, few.train, checkpoint)
    path = write_checkpoint(config, tmp_path / "adapted", known=values)
    with open_model(path) as merged:
        export_model(merged, tmp_path / "merged", tokenizer="none")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, expected = get_logits(merged, tokens), get_logits(theirs, tokens)
    assert_near(ours, expected, SUMS, size=float(expected.abs().max()))


def check_pieces(config, folder, values, base):
    """Loaded in pieces as ranks have them, adapters keep what values of a lower rank lack."""
    specs = [spec for spec in list_model_specs(config.model, config.train) if spec.name in values]
    pieces = []
    for spec in specs:
        runs = iterate_row_major_runs(Box((0,) * len(spec.shape), spec.shape), 1, spec.size)
        pieces += [(spec.name, spec, box, torch.full(box.shape, 7.0).double()) for box in runs]
    load_adapters(folder, config.model, config.train, pieces, base)
    for name, spec, box, piece in pieces:
        whole = torch.full(spec.shape, 7.0, dtype=torch.float64)
        whole[: len(values[name])] = values[name]
        assert piece.equal(whole[box.slices]), name


def test_rows_of_interleaved_pairs_are_put_apart():
    (spec,) = LinearSpec((6,), (2, 8), 0.1).declare_own_parameters("query")
    part = TensorPart(spec, Box((1, 0, 0), (1, 8, 6)), head=8, rotated=4, scale=2.0)
    b = torch.arange(24.0).view(1, 8, 3)
    rows = part.to_hugging_face(b)
    assert not rows.equal(b[0] / 2.0) and arrange_rows(part, rows).equal(b)


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    def refuse(adapters, message, model=None, **settings):
        (folder / "adapter_config.json").write_text(json.dumps({**saved, **settings}))
        config = RunConfig(model={**SIZES, **LLAMA, **(model or {}), "adapters": adapters})
        with pytest.raises(UserError, match=message):
            read_adapters(folder, config.model, config.train)

    adapters = {**ADAPTERS, "targets": ["query", "down"]}
    folder = tmp_path / "peft"
    with open_checkpoint(write_checkpoint(make_config("llama", adapters), tmp_path)) as checkpoint:
        export_adapters(checkpoint, folder)
    saved = json.loads((folder / "adapter_config.json").read_text())
    family = {"family": "llama"}
    refuse({**adapters, "rank": 4}, r"rank 3 and alpha 6, and .* rank 4 and alpha 6", family)
    refuse({**adapters, "alpha": 3}, r"use model.adapters.rank=3 model.adapters.alpha=6", family)
    refuse(adapters, r"q_proj.lora_A.* \[3, 16\], .* \[3, 24\]: it is an", {**family, "hidden": 24})
    fewer, more = {**adapters, "targets": ["down"]}, {**adapters, "targets": ["query", "mlp.*"]}
    refuse(fewer, r"has 4 factors; the file has besides them 4, the first .*q_proj", family)
    refuse(more, r"has 16 factors; the file lacks 8, the first .*gate_proj", family)
    for settings, message in (
        ({"use_dora": True}, "use_dora=true, and .* use model.adapters.dora=true"),
        ({"rank_pattern": {"q_proj": 4}}, r"q_proj.lora_A.* \[3, 16\], .* \[4, 16\]"),
        ({"rank_pattern": {"(q+)+": 4}}, r"rank_pattern names modules by \(q\+\)\+"),
        ({"alpha_pattern": {"[q": 4}}, r"alpha_pattern names modules by \[q"),
        ({"alpha_pattern": {".*.*.*.*.*q": 4}}, "patterns without groups"),
        ({"alpha_pattern": {"q_proj": "4"}}, "r and lora_alpha are no numbers"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa changes the base"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is no low-rank adapter"),
        ({"r": "3"}, "r and lora_alpha are no numbers"),
        ({"something_new": 1}, "something_new=1 is not known"),
    ):
        refuse(adapters, message, family, **settings)


def test_names_are_short_where_all_modules_have_adapters(tmp_path):
    def read_config(adapters, folder):
        path = write_checkpoint(make_config("llama", adapters), folder / "run")
        with open_checkpoint(path) as checkpoint:
            export_adapters(checkpoint, folder / "peft", base="somewhere")
        return json.loads((folder / "peft/adapter_config.json").read_text())

    config = read_config({**ADAPTERS, "targets": ["query", "value"]}, tmp_path / "all")
    assert config["target_modules"] == ["q_proj", "v_proj"] and not config["rank_pattern"]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6, 0.0)
    assert config["base_model_name_or_path"] == "somewhere"
    config = read_config({**ADAPTERS, "targets": ["query"], "layers": [1]}, tmp_path / "one")
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
