"""The configs of published models: the specs that layers declare sum to the exact counts."""

from pathlib import Path

import pytest

from megaframe.architecture.spec import count_active_parameters, count_parameters
from megaframe.config import load
from megaframe.model.model_chunk import list_model_specs
from megaframe.validate.run import validate_config

CONFIGS = Path(__file__).parents[2] / "configs"

# Elements of each model's released weights; a tied head counts once.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "deepseek-v4-flash": 284_332_230_231,
    "kimi-k2": 1_026_408_209_408,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "minimax-m2": 228_689_748_992,
    "glm-5": 743_911_199_232,
    "glm-4.5": 352_797_814_784,
    "gemma2-9b": 9_241_705_984,
    "phi-4": 14_659_507_200,
    "olmo3-7b": 7_298_011_136,
    "llama3.1-8b": 8_030_261_248,
    "llama4-scout": 107_769_861_120,
    "glm-4.5-air": 106_852_245_504,
    "gemma3-27b": 27_009_346_304,
    "lfm2-1.2b": 1_170_340_608,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "falcon-h1-0.5b": 521_411_104,
    "granite-4.0-h-small": 32_207_337_984,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "mimo-v2-flash": 308_778_768_832,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "lfm3-1.7b": 1_728_801_536,
    "gemma4-31b": 30_697_345_340,
    "gemma4-26b-a4b": 25_233_141_790,
    "gemma4-e2b": 4_628_569_379,
    "gemma3n-e4b": 6_835_235_568,
}

# Billions of parameters that are active for a token, as the authors report them.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "kimi-k2": 32.6,
    "llama4-scout": 17,
    "nemotron-3-nano-30b-a3b": 3.6,
    "gemma4-26b-a4b": 3.8,
}


def list_specs(name, depth=0):
    config = load(str(CONFIGS / f"{name}.yaml"), [f"model.mtp_depth={depth}"])
    return list_model_specs(config.model, config.train)


def count(name):
    return count_parameters(list_specs(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_released_models(name):
    assert count(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_meets(name):
    assert count_active_parameters(list_specs(name)) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def test_gpt3_has_the_parameters_of_its_published_shape():
    # The weights are not released, and the paper rounds to 175.0 billion. Compared with the closed
    # form (GPT-2 blocks with biases, 12 h^2 + 13 h, embeddings, final norm) and the rounded number.
    layers, hidden, vocab, positions = 96, 12288, 50257, 2048
    blocks = layers * (12 * hidden**2 + 13 * hidden)
    closed_form = blocks + (vocab + positions) * hidden + 2 * hidden
    assert count("gpt3-175b") == closed_form == 174_604_259_328
    assert closed_form == pytest.approx(175.0e9, rel=0.003)


def test_a_predictor_of_deepseek_v3_is_a_block_and_what_joins_two_streams():
    hidden = 7168
    last = [spec for spec in list_specs("deepseek-v3") if spec.name.startswith("blocks.60.")]
    extra = count_parameters(list_specs("deepseek-v3", 1)) - PUBLISHED["deepseek-v3"]
    assert extra == count_parameters(last) + 2 * hidden**2 + 3 * hidden


def test_the_switch_has_eight_mlps_in_every_other_layer():
    # gpt2-124m without its biases, but with routers in six layers.
    hidden, blocks = 768, 12
    active = PUBLISHED["gpt2-124m"] - (11 * blocks + 1) * hidden + 6 * 8 * hidden
    specs = list_specs("gpt2-124m-switch")
    assert count_active_parameters(specs) == active
    assert count_parameters(specs) == active + 6 * 7 * 2 * 4 * hidden**2


@pytest.mark.parametrize("name", ["demo", "demo-moe", "demo-islands"])
def test_the_demos_are_small(name):
    assert 4e6 < count_active_parameters(list_specs(name)) < 6e6


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_sound(path):
    config = load(str(path))
    if not config.data.sources:
        config = load(str(path), ["data.sources=[{path: tokens}]"])
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline * parallel.context * parallel.expert
    ranks *= parallel.islands
    validate_config(config, ranks)
    validate_config(config, 2 * ranks)
    assert config.run.dir == f"runs/{path.stem}"
    assert config.model.vocab is not None


def test_every_published_config_is_held_to_its_count():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert names == {
        *PUBLISHED,
        "gpt3-175b",
        "gpt2-124m-switch",
        "demo",
        "demo-moe",
        "demo-phases",
        "demo-islands",
        "demo-server",
        "demo-chat-base",
        "demo-chat",
    }
