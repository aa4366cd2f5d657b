"""Published folders of Hugging Face: from the names and shapes of their tensors, an import plans
every one, and needs no other.

`published_folders.json` has their `config.json` (`source`), the elements of their tensors that a
model for texts needs, and what tensors they have. `names` is where these are from: the index of a
folder, or else what transformers 5.23 would save of its class on the meta device. Predictors of
further tokens, which its classes leave out, are as DeepSeek's README_WEIGHTS.md and Qwen name them,
and experts of gpt-oss as they are packed. A config of the same name in configs/ declares the same
parameters.

Not all of a `config.json` was read from its folder: DeepSeek-V3.2, GLM-4.5, GLM-5, Gemma 2 9B, Kimi
K2, LFM2, Llama 4, OLMo 3, Phi-4 and a few keys of GLM-4.5-Air and Qwen3-Next are written down from
papers and model cards; of Llama 4 the section of its model for texts, without a tower for images.
Falcon-H1, Gemma 4, Granite 4, Nemotron 3, MiMo-V2, Kimi Linear and DeepSeek-V4-Flash are written
down from what other public repositories quote of their folders (so is the name of Kimi Linear's
dense MLP, and are those of DeepSeek-V4-Flash, as dequantised and without predictors), LFM3 and
Qwen3.5 (its model for texts) from the sizes of transformers' class. A key there that decides no
shape, such as an epsilon, may differ from the folder's, which no test here reads.
"""

import json
import math
from pathlib import Path

import pytest
from slow_cases import mark_slow
from tensor_lists import expand_tensors

from megaframe.architecture.spec import NO_PARAMETERS, count_parameters
from megaframe.checkpoint.convert.huggingface.model_folder import plan_import
from megaframe.checkpoint.convert.huggingface.read_files import TensorHeader
from megaframe.config import load
from megaframe.model.model_chunk import list_model_specs

FOLDERS = json.loads((Path(__file__).parent / "published_folders.json").read_text())
CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = (
    *("deepseek-v3", "glm-4.5", "glm-4.5-air", "kimi-k2", "minimax-m2", "qwen3-next-80b-a3b"),
    *(
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "glm-5",
        "kimi-linear-48b-a3b",
        "mimo-v2-flash",
        "qwen3.5-35b-a3b",
    ),
)
"""Folders with tens of thousands of tensors."""


PACKED = ("_blocks", "_scales")
"""What names of MXFP4 tensors end with."""


def find_type(name):
    """Return the type of a tensor."""
    if name.endswith(PACKED):
        return "U8"
    return "I64" if name.endswith("tid2eid") else "BF16"


def plan_published(name):
    """Return the plan for a published folder."""
    folder = FOLDERS[name]
    headers = {
        key: TensorHeader(key, Path(), shape, find_type(key))
        for key, shape in expand_tensors(folder["tensors"]).items()
    }
    return plan_import(Path("no folder"), folder["config"], headers)


@pytest.mark.parametrize("name", mark_slow(FOLDERS, except_for=FOLDERS.keys() - {*LARGE}))
def test_an_import_plans_every_tensor_of_a_published_folder(name):
    """A tensor that is missing, unknown or of another shape is refused."""
    plan = plan_published(name)
    left_out = len(plan.headers) - len(plan.tensors)
    assert (left_out > 0) == any("predict further tokens" in note for note in plan.notes)
    read = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    others = sum(
        math.prod(tensor.shape)
        for tensor in plan.tensors
        if any(part.spec.role in NO_PARAMETERS for part in tensor.parts)
    )
    assert count_parameters(plan.specs) == read - others
    towers = sum(
        math.prod(shape)
        for key, shape in expand_tensors(FOLDERS[name]["tensors"]).items()
        if key.startswith(TOWERS)
    )
    assert read + towers == FOLDERS[name]["parameters"]
    if (path := CONFIGS / f"{name}.yaml").exists():
        config = load(str(path), ["model.mtp_depth=0"])
        shapes = {spec.name: spec.shape for spec in list_model_specs(config.model, config.train)}
        assert shapes == {spec.name: spec.shape for spec in plan.specs}


TOWERS = ("vision_tower.", "multi_modal_projector.")
