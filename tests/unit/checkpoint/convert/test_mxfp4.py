"""Weights in MXFP4 are read as what their 4-bit numbers and scales mean.

Tests `megaframe.checkpoint.convert.huggingface.mxfp4`.
"""

import math

import pytest
import torch
from small_model_folders import make_weights, write_folder

from megaframe.checkpoint import Slice, open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.mxfp4 import dequantize
from megaframe.errors import UserError

CONFIG = {
    **{"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
    **{"vocab_size": 40, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
    **{"max_position_embeddings": 64, "dtype": "bfloat16"},
}
PACKED = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts."


def decode(code, scale):
    """Return the number of a 4-bit code: a sign, two bits of exponent with bias 1, and one of
    mantissa; the least exponent has no leading one."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    fraction = (exponent > 0) + mantissa / 2
    return math.ldexp((-1) ** sign * fraction, max(exponent, 1) - 1 + scale - 127)


def test_every_code_with_every_scale_is_the_closed_form():
    """All 256 bytes, so that each half has each code beside each other one; scales of 254 overflow
    fp32 from 2 on, and one of 255 means no number."""
    every = torch.arange(256, dtype=torch.uint8)
    blocks = every.view(1, 1, 16, 16).expand(256, 1, 16, 16)
    scales = every.view(256, 1, 1).expand(256, 1, 16)
    values = dequantize(blocks, scales)
    assert values.shape == (256, 512, 1)
    for scale in range(255):
        expected = [decode(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)]
        assert torch.equal(values[scale, :, 0], torch.tensor(expected, dtype=torch.float64).float())
    assert values[255].isnan().all()


def draw_packed(generator, *shape):
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(115, 124, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.slow
def test_transformers_computes_the_same_numbers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = draw_packed(torch.Generator().manual_seed(0), 3, 10, 2)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize(blocks, scales), expected)


@pytest.fixture
def tensors():
    """Tensors of a folder whose experts are packed."""
    generator, whole = torch.Generator().manual_seed(0), make_weights(CONFIG)
    for name, outputs, groups in (("gate_up_proj", 128, 1), ("down_proj", 32, 2)):
        del whole[f"{EXPERTS}{name}"]
        packed = draw_packed(generator, 3, outputs, groups)
        whole |= zip((f"{EXPERTS}{name}_blocks", f"{EXPERTS}{name}_scales"), packed, strict=True)
    return whole


def read_all(imported):
    with open_checkpoint(imported.checkpoint) as opened:
        values = {name: torch.empty(saved.shape) for name, saved in opened.tensors.items()}
        opened.load([Slice(n, v.shape, (0,) * v.dim(), v) for n, v in values.items()])
    return values


def test_a_packed_folder_is_imported_as_the_dequantised_one(tensors, tmp_path):
    packed = folders.import_model(
        write_folder(tmp_path / "packed", PACKED, tensors), tmp_path / "a"
    )
    for name in ("gate_up_proj", "down_proj"):
        both = (tensors.pop(f"{EXPERTS}{name}_{kind}") for kind in ("blocks", "scales"))
        tensors[f"{EXPERTS}{name}"] = dequantize(*both)
    plain = folders.import_model(write_folder(tmp_path / "plain", CONFIG, tensors), tmp_path / "b")
    expected = read_all(plain)
    for name, value in read_all(packed).items():
        assert torch.equal(value, expected[name]), name


def test_what_is_not_whole_or_no_number_is_refused(tensors, tmp_path):
    def refuse(name, config, changed, message):
        folder = write_folder(tmp_path / name, config, changed)
        with pytest.raises(UserError, match=message):
            folders.import_model(folder, tmp_path / f"own {name}")

    scales = f"{EXPERTS}down_proj_scales"
    rest = {name: tensor for name, tensor in tensors.items() if name != scales}
    refuse("no scales", PACKED, rest, r"experts.down_proj is missing")
    refuse("other", PACKED, {**rest, scales: tensors[scales][:, :5].clone()}, "is missing")
    refuse("nan", PACKED, {**rest, scales: tensors[scales] | 255}, "6144 of 6144 elements are NaN")
    refuse("no key", CONFIG, tensors, "experts.gate_up_proj is missing")
    for number, section in enumerate(({"quant_method": "awq"}, {**PACKED, "bits": 4}, "mxfp4")):
        config = {**CONFIG, "quantization_config": section}
        refuse(f"{number}", config, tensors, "only floating-point weights and MXFP4 are read")
