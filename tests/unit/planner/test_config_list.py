"""The list of shipped configs."""

import pytest
from entry_runs import pretrain_gpt

from megaframe.config.shipped import CONFIGS, list_shipped_configs
from megaframe.planner.config_list import count_config_parameters, describe_configs


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_parameters_are_those_that_are_published(name, count):
    assert count_config_parameters(name) == count


def test_every_config_has_a_line_with_what_it_is_and_is_for(call_main):
    _, text, _ = call_main(pretrain_gpt.main, "--list-configs")
    assert text == f"{describe_configs()}\n"
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} < {*lines}
    assert max(map(len, text.splitlines())) <= 100
    assert "  8.03B  8 x H100 " in lines["llama3-8b"] and "Llama 3 8B (April" in lines["llama3-8b"]
    assert "  1 x CPU  " in lines["demo"] and "A GPT of 5 million" in lines["demo"]


def test_every_config_says_what_it_is_and_what_machine_it_is_for():
    assert all(config.text and config.machine for config in list_shipped_configs())
