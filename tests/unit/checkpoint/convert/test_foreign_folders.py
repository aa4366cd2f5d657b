"""Foreign folders: whatever is in them, an import is right or one error, and does no harm.

Tests `megaframe.checkpoint.convert.huggingface.build_model`,
`megaframe.checkpoint.convert.huggingface.key_types`,
`megaframe.checkpoint.convert.huggingface.match_tensors` and
`megaframe.checkpoint.convert.huggingface.read_files`.
"""

import json
import os
import random
import resource
import struct
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slow_cases import mark_slow
from small_model_folders import CONFIGS, make_weights, write_folder, write_small_folder

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface import read_files
from megaframe.checkpoint.convert.huggingface.read_files import read_tensor
from megaframe.errors import UserError

MEGABYTE = 1 << 20
VALUES = (
    *(None, True, False, 0, 1, 2, 3, 7, 8, 16, 61, -1, 2**31, 2**63, 10**30, -(10**30)),
    *(0.5, 1.0, -1.5, 1e-300, 1e308, 1e-6, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "yarn", "llama3", "float32", "full_attention", "\x1b[31m", "\ud800", "\0"),
    *([], [1], ["x"], [[]], {}, {"a": 1}, {"rope_type": "yarn"}, ["sliding_attention"] * 2),
)
"""What a key is changed to."""
OTHERS = (
    *("sliding_window", "layer_types", "rope_scaling", "rope_theta", "attention_bias", "head_dim"),
    *("tie_word_embeddings", "use_sliding_window", "max_window_layers", "torch_dtype", "n_layer"),
    *("topk_method", "scoring_func", "num_experts", "quantization_config", "norm_topk_prob"),
)
"""Keys that are added."""
FREE = {
    *("dtype", "torch_dtype", "max_window_layers", "sliding_window", "layer_types"),
    *("use_sliding_window", "rope_theta"),
}
"""Keys that an export writes in another form."""


def read_refusal(folder, to):
    """Return the error of an import, of one folder to a new one, after which nothing is left."""
    with pytest.raises(UserError) as error:
        folders.import_model(folder, to)
    assert not to.exists() or not os.listdir(to)
    return str(error.value)


def assert_right(folder, to, exported):
    """Assert that an import has the folder's weights and what its config says."""
    with open_checkpoint(to / "step-00000000") as opened:
        folders.export_model(opened, exported, "fp32", "none")
    actual, reference = (load_file(path / "model.safetensors") for path in (exported, folder))
    assert actual.keys() == reference.keys()
    assert all(torch.equal(actual[name], reference[name]) for name in reference)
    actual, reference = (
        json.loads((path / "config.json").read_text()) for path in (exported, folder)
    )
    for key in actual.keys() & reference.keys() - FREE:
        if key == "rope_parameters":
            base = (reference[key] or {}).get("rope_theta") or reference.get("rope_theta")
            default = 1e6 if reference["model_type"] == "mixtral" else 1e4
            assert actual[key]["rope_theta"] == float(base or default)
        elif reference[key] is not None:
            kind = type(actual[key])  # 10**30 is read as 1e30
            assert actual[key] == kind(reference[key]), key


def mutate_config(config, draw):
    """Change, remove or add one to three keys."""
    config = json.loads(json.dumps(config))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = config
        inner = config.get("rope_parameters")
        if isinstance(inner, dict) and inner and draw.random() < 0.25:
            place = inner
        key = draw.choice([*place, *(OTHERS if place is config else ())])
        old = place.get(key)
        mutation = draw.randrange(4)
        if mutation == 0:
            place.pop(key, None)
        elif mutation == 1 and isinstance(old, int | float):
            place[key] = draw.choice((old * 2, old + 1, old - 1, -old, float(old), str(old)))
        else:
            place[key] = draw.choice(VALUES)
    return config


@pytest.mark.parametrize("family", mark_slow(CONFIGS, except_for=["gpt2"]))
def test_a_changed_config_is_read_right_or_refused(family, tmp_path):
    folder = write_small_folder(tmp_path / "theirs", family)
    folders.import_model(folder, tmp_path / "first")
    assert_right(folder, tmp_path / "first", tmp_path / "first-hf")
    draw, outcomes = random.Random(family), [0, 0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(200):
        config = mutate_config(CONFIGS[family], draw)
        (folder / "config.json").write_text(json.dumps(config))
        to = tmp_path / f"to-{number}"
        try:
            folders.import_model(folder, to)
        except UserError as error:
            assert str(error).isprintable() or "does not fit its config" in str(error)
            assert len(str(error)) < 2000 and not to.exists()
            outcomes[0] += 1
            continue
        assert_right(folder, to, tmp_path / f"again-{number}")
        outcomes[1] += 1
    assert min(outcomes) > 20, outcomes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 100 * MEGABYTE


@given(data=st.data())
def test_changed_bytes_of_any_file_are_refused_or_read(data, tmp_path_factory):
    """A changed weight cannot be noticed; anything else must be an error, not a traceback."""
    tmp_path = tmp_path_factory.mktemp("bytes")
    folder = write_small_folder(tmp_path / "theirs")
    path = folder / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, min(len(content) - 1, 4000)))
    content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        folders.import_model(folder, tmp_path / "to")
    except UserError:
        assert not (tmp_path / "to").exists()


ABSURD = {
    "num_hidden_layers": "1000000000 layers are more than the folder's 21 tensors",
    "hidden_size": "hidden_size=1000000000 is more than the folder holds: 21 tensors,",
    "num_attention_heads": "num_attention_heads=1000000000: input should be less than or equal to",
    "vocab_size": "vocab_size=1000000000 is more than",
}


@pytest.mark.parametrize("key", ABSURD)
def test_absurd_sizes_are_refused_before_any_work(key, tmp_path):
    folder = write_small_folder(tmp_path / "theirs", tie_word_embeddings=False)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["llama"], key: 10**9}))
    assert ABSURD[key] in read_refusal(folder, tmp_path / "to")


def write_tensors(path, tensors, size):
    """Write a safetensors file whose elements take no place on the disk.

    tensors: By name the shape and the offsets of F16 elements.
    """
    header = {
        name: {"dtype": "F16", "shape": shape, "data_offsets": offsets}
        for name, (shape, offsets) in tensors.items()
    }
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    os.truncate(path, path.stat().st_size + size)


def test_tensors_without_elements_hold_no_size(tmp_path):
    folder = write_small_folder(tmp_path / "theirs")
    shapes = {"rows": ([2**31 - 1, 0], [0, 0]), "columns": ([0, 10**12], [0, 0])}
    write_tensors(folder / "model.safetensors", {**shapes, "one": ([3, 1], [0, 6])}, 6)
    config = {**CONFIGS["llama"], "num_hidden_layers": 1, "vocab_size": 10**6}
    (folder / "config.json").write_text(json.dumps(config))
    message = "vocab_size=1000000 is more than the folder holds: 1 tensors, the widest of 3 rows"
    assert message in read_refusal(folder, tmp_path / "to")


def test_a_file_has_a_largest_number_of_tensors(tmp_path, monkeypatch):
    folder = write_small_folder(tmp_path / "theirs")
    monkeypatch.setattr(read_files, "_MAX_TENSORS", 20)
    message = "model.safetensors has 21 tensors; the most is 20"
    assert message in read_refusal(folder, tmp_path / "to")


def test_a_file_that_cannot_be_mapped_is_named(tmp_path, monkeypatch):
    """As torch has it where the address space is limited."""
    folder = write_small_folder(tmp_path / "theirs")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    size = 1 << 40
    write_tensors(folder / "model.safetensors", {"x": ([size // 2], [0, size])}, size)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        message = read_refusal(folder, tmp_path / "to")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "cannot read" in message and "Cannot allocate memory" in message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2': input should be a valid integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0: input should be a valid integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: input should be a valid integer"),
        ({"hidden_size": -16}, "hidden_size=-16: input should be greater than or equal to 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: input should be a finite number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: input should be greater than 0"),
        ({"rms_norm_eps": None}, "llama: rms_norm_eps is missing"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]: input should be an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs factor, original_max"),
        ({"rope_parameters": {"\x1b[31m": 1}}, r"'rope_parameters.\x1b[31m'=1: extra inputs"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention={}: extra"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not a known family; known are gpt2"),
        ({"model_type": "mistral"}, "mistral: sliding_window is missing"),
        ({"num_key_value_heads": 3}, "model.kv_heads=3 does not divide model.heads=4"),
    ],
)
def test_wrong_types_and_ranges_are_named(keys, message, tmp_path):
    folder = write_small_folder(tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["llama"], **keys}))
    assert message in read_refusal(folder, tmp_path / "to")


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
def test_weights_that_are_no_floating_point_numbers_are_refused(dtype, tmp_path):
    tensors = make_weights(CONFIGS["llama"])
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    folder = write_folder(tmp_path / "theirs", CONFIGS["llama"], tensors)
    message = read_refusal(folder, tmp_path / "to")
    assert "model.norm.weight has the type" in message
    assert "weights are F64, F32, F16, BF16" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_number(value, tmp_path):
    tensors = make_weights(CONFIGS["llama"])
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5:7] = value
    folder = write_folder(tmp_path / "theirs", CONFIGS["llama"], tensors)
    message = "model.layers.1.mlp.up_proj.weight: 2 of 192 elements are NaN or infinite in fp32"
    (tmp_path / "old").mkdir()
    for target in (tmp_path / "old", tmp_path / "new/to"):
        assert read_refusal(folder, target) == message
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "old"}
    assert not [*(tmp_path / "old").iterdir()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_floating_point_types_are_read(dtype, tmp_path):
    tensors = make_weights(CONFIGS["llama"], dtype)
    named = str(dtype).removeprefix("torch.")
    folder = write_folder(tmp_path / "theirs", {**CONFIGS["llama"], "dtype": named}, tensors)
    checkpoint = folders.import_model(folder, tmp_path / "to").checkpoint
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "again")
    exported_again = load_file(tmp_path / "again/model.safetensors")
    assert json.loads((tmp_path / "again/config.json").read_text())["dtype"] == named
    assert all(
        torch.equal(exported_again[name], tensors[name].float().to(dtype)) for name in tensors
    )


def test_numbers_too_large_for_a_type_are_not_exported(tmp_path):
    tensors = make_weights(CONFIGS["llama"])
    tensors["model.norm.weight"][2] = 1e6
    folder = write_folder(tmp_path / "theirs", CONFIGS["llama"], tensors)
    message = r"norm\.weight: 1 of 16 .* infinite in float16"
    checkpoint = folders.import_model(folder, tmp_path / "to").checkpoint
    with open_checkpoint(checkpoint) as opened, pytest.raises(UserError, match=message):
        folders.export_model(opened, tmp_path / "again", "fp16")
    assert sorted(os.listdir(tmp_path)) == ["theirs", "to"]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_opened(name, kind, tmp_path):
    folder = write_small_folder(tmp_path / "theirs")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    why = "Is a directory" if kind == "folder" else "Not a regular file"
    assert read_refusal(folder, tmp_path / "to") == f"cannot read {folder / name}: {why}"


def test_links_to_files_are_followed_as_the_hubs_cache_has_them(tmp_path):
    folder = write_small_folder(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert folders.import_model(tmp_path / "snapshot", tmp_path / "to").checkpoint.exists()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"model.norm.weight": ".."}, "Is a directory"),
        ({"model.norm.weight": "../secret"}, "no weight_map of file names in this folder"),
        ({"model.norm.weight": "/etc/passwd"}, "no weight_map of file names in this folder"),
        ({"model.norm.weight": ""}, "Is a directory"),
        ({"model.norm.weight": "a\0b"}, "No file can have this name"),
        ({"model.norm.weight": "x" * 300}, "File name too long"),
        ({"model.norm.weight": "other.safetensors"}, "No such file"),
        ({"absent": "model.safetensors"}, "absent is not in model.safetensors, as"),
        ({"\x1b[31m": "model.safetensors"}, r"'\x1b[31m' is not in model.safetensors"),
        ([1], "has no weight_map"),
    ],
)
def test_an_index_names_files_of_the_folder(index, message, tmp_path):
    folder = write_small_folder(tmp_path / "theirs")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert message in read_refusal(folder, tmp_path / "to")


def test_a_tensor_is_in_one_file(tmp_path):
    folder = write_small_folder(tmp_path / "theirs")
    tensors = make_weights(CONFIGS["llama"])
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    index = dict.fromkeys(tensors, "model.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    message = read_refusal(folder, tmp_path / "to")
    assert "model.norm.weight is in two files, b.safetensors and model.safetensors" in message


def test_names_without_the_prefix_of_a_head_are_those_of_the_model(tmp_path):
    """GPT-2's own folder was saved so, with the masks of its attention as buffers."""
    tensors = make_weights(CONFIGS["gpt2"])
    buffers = {f"h.{layer}.attn.bias": torch.ones(1, 1, 20, 20) for layer in range(2)}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    folder = write_folder(tmp_path / "bare", CONFIGS["gpt2"], {**bare, **buffers})
    folders.import_model(folder, tmp_path / "to")
    whole = write_folder(tmp_path / "whole", CONFIGS["gpt2"], tensors)
    assert_right(whole, tmp_path / "to", tmp_path / "again")


def test_predictors_are_left_out_and_named(tmp_path):
    config = {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1}
    extra = {f"model.layers.2.{name}.weight": torch.ones(16) for name in ("enorm", "hnorm")}
    folder = write_folder(tmp_path / "theirs", config, {**make_weights(config), **extra})
    (note,) = folders.import_model(folder, tmp_path / "to").notes
    assert note.startswith("2 tensors of layer 2 are left out: they predict further tokens")
    (folder / "config.json").write_text(json.dumps(CONFIGS["deepseek_v3"]))
    message = read_refusal(folder, tmp_path / "again")
    assert "model.layers.2.enorm.weight [16] has no counterpart" in message
    assert "mend config.json if it is of another model" in message


@pytest.mark.parametrize(
    ("family", "embedding"),
    [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")],
)
def test_output_weights_beside_tied_embeddings_are_used_if_they_differ(family, embedding, tmp_path):
    config = {**CONFIGS[family], "tie_word_embeddings": True}
    tensors = make_weights(config)
    equal = {**tensors, "lm_head.weight": tensors[embedding].clone()}
    folder = write_folder(tmp_path / "equal", config, equal)
    imported = folders.import_model(folder, tmp_path / "to-equal")
    assert imported.notes == ("lm_head.weight is left out: it equals the tied embeddings",)
    other = {**tensors, "lm_head.weight": 2 * tensors[embedding]}
    folder = write_folder(tmp_path / "other", config, other)
    imported = folders.import_model(folder, tmp_path / "to-other")
    assert imported.notes[0].startswith("lm_head.weight differs from the embeddings")
    with open_checkpoint(imported.checkpoint) as opened:
        folders.export_model(opened, tmp_path / "again", "fp32", "none")
    exported = load_file(tmp_path / "again/model.safetensors")
    assert torch.equal(exported["lm_head.weight"], other["lm_head.weight"])
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_an_import_keeps_two_tensors_at_most(family, tmp_path, monkeypatch):
    """The one that is being written, and the next one. A file of weights has many."""
    folder, kept, most = write_small_folder(tmp_path / "theirs", family), [], [0]

    def read(header):
        tensor = read_tensor(header)
        kept.append((weakref.ref(tensor.untyped_storage()), tensor.nbytes))
        most[0] = max(most[0], sum(size for storage, size in kept if storage() is not None))
        return tensor

    monkeypatch.setattr(folders, "read_tensor", read)
    folders.import_model(folder, tmp_path / "own")
    sizes = [size for _, size in kept]
    assert len(sizes) == len(load_file(folder / "model.safetensors"))
    assert most[0] <= max(map(sum, pairwise(sizes)))
