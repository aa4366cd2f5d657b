"""Properties of all configs: a dump loads back equal, and bad input is a `UserError`, no crash."""

from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megaframe.config import DataSourceConfig, RunConfig, dump, explain, load
from megaframe.config.blocks import (
    AttentionConfig,
    BlockConfig,
    LatentMixerConfig,
    MLPConfig,
    MoEMixtureConfig,
    QueryScaleConfig,
    RotaryScalingConfig,
)
from megaframe.config.data import PhaseConfig, PhasePosition
from megaframe.config.keys import find_nearest_keys, get_config_keys
from megaframe.config.migration import translate_setting
from megaframe.config.model import AltUpConfig, HyperConnectionsConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.registry import is_part
from megaframe.config.section import MOST
from megaframe.config.url import find_text_mistake
from megaframe.errors import UserError
from megaframe.layout import count_fewest_ranks, resolve_axis_sizes

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: find_text_mistake(text) is None
)


def section(annotation, **kept):
    """Return a strategy for sections of which any keys are given, and always those of `kept` and
    those without a default."""
    given, optional = {n: st.just(v) for n, v in kept.items()}, {}
    for name, field in annotation.model_fields.items():
        if name not in kept:
            keys = given if field.is_required() else optional
            keys[name] = make_strategy(field.annotation, field.metadata)
    return st.fixed_dictionaries(given, optional=optional)


def make_strategy(annotation, bounds=()):
    """Return a strategy for all values that a type annotation of the schema allows."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [b for field in args[1:] for b in getattr(field, "metadata", [field])]
        return make_strategy(args[0], inner)
    if origin in (Union, UnionType):
        # Parts of extensions exist only where one is named.
        members = [a for a in args if not is_part(a)]
        return st.one_of(
            st.none() if a is type(None) else make_strategy(a, bounds) for a in members
        )
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is Ellipsis and is_part(next(iter(get_args(args[0])), None)):
        return st.just([])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(make_strategy(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(make_strategy, args)).map(list)
    if annotation is BlockConfig:
        return BLOCKS
    if annotation in (PhaseConfig, PhasePosition, QueryScaleConfig, RotaryScalingConfig):
        return section(annotation)
    if annotation in (AltUpConfig, HyperConnectionsConfig):
        return section(annotation, kind=get_args(annotation.model_fields["kind"].annotation)[0])
    if annotation is DataSourceConfig:
        return st.fixed_dictionaries({"path": TEXT}, optional={"weight": st.floats(1e-3, 1e3)})
    limits = {n: getattr(b, n) for b in bounds for n in ("gt", "ge", "lt", "le") if hasattr(b, n)}
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if annotation is int:
        return st.integers(low + ("gt" in limits), high if high is not None else 10**12)
    if annotation is float:
        return st.floats(
            low,
            high,
            exclude_min="gt" in limits,
            exclude_max="lt" in limits,
            allow_nan=False,
            allow_infinity=False,
        )
    return {bool: st.booleans(), str: TEXT}[annotation]


PARTS = {
    "mixer": (AttentionConfig, LatentMixerConfig),
    "feed_forward": (MLPConfig, MoEMixtureConfig),
}
BLOCKS = st.fixed_dictionaries(
    {},
    optional={
        "repeat": st.integers(1, 3),
        "mixer": section(AttentionConfig) | section(LatentMixerConfig, kind="latent"),
        "feed_forward": section(MLPConfig) | section(MoEMixtureConfig, kind="moe"),
        "norms": st.sampled_from(["before", "after", "both", "none"]),
        "parallel": st.sampled_from(["none", "one_norm", "two_norms"]),
        "residual_scale": st.floats(1e-3, 1e3),
    },
)
WHOLE = ("train.batch_ramp.", "model.latent.", "model.indexer.", "model.moe.")
"""Sections that are given whole or not at all."""
EVERY_LEAF = {
    name: make_strategy(key.field.annotation, key.field.metadata)
    for name, key in get_config_keys().items()
    if key.section is None
}
LEAVES = {name: value for name, value in EVERY_LEAF.items() if not name.startswith(WHOLE)}
RAMP = st.fixed_dictionaries({k: st.integers(1, 9) for k in ("start", "increment", "samples")})
LATENT = st.fixed_dictionaries(
    {k: st.integers(1, 9) for k in ("kv_rank", "head_dim", "rotary_dim", "value_dim")},
    optional={"query_rank": st.none() | st.integers(1, 9)},
)
INDEXER = st.fixed_dictionaries({k: st.integers(1, 9) for k in ("heads", "head_dim", "top_k")})
OF_MOE = {name[10:]: value for name, value in EVERY_LEAF.items() if name[:10] == "model.moe."}
MOE = st.fixed_dictionaries({"experts": OF_MOE.pop("experts")}, optional=OF_MOE)
SECTIONS = {
    "train.batch_ramp": RAMP | st.none(),
    "model.latent": LATENT | st.none(),
    "model.indexer": INDEXER | st.none(),
    "model.moe": MOE | st.none(),
}
SETTINGS = st.fixed_dictionaries({}, optional=LEAVES | SECTIONS).filter(
    # The default of `model.ffn` is four times this, and has the limit of any number.
    lambda keys: "model.ffn" in keys or 4 * keys.get("model.hidden", 1) <= MOST
)


def nest(assignments):
    tree = {}
    for name, value in assignments.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "config.yaml"


@given(SETTINGS)
@example({"run.dir": "\x85"})
@example({"model.heads": 769})
def test_what_is_dumped_loads_back_equal(file, keys_by_section):
    config = RunConfig.model_validate(nest(keys_by_section))
    file.write_text(dump(config), encoding="utf-8")
    assert load(str(file)) == config


@given(SETTINGS)
def test_an_override_is_worth_a_line_of_the_file(file, keys_by_section):
    file.write_text(yaml.safe_dump(nest(keys_by_section)), encoding="utf-8")
    overrides = [
        f"{name}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
        for name, value in keys_by_section.items()
    ]
    expected = RunConfig.model_validate(nest(keys_by_section))
    assert load(str(file)) == expected == load(None, overrides)


LEAF = st.sampled_from(sorted(LEAVES))


@given(st.lists(st.tuples(LEAF, TEXT.filter(bool), st.integers(0, 3)), max_size=4))
def test_spaces_around_an_equals_sign_change_nothing(assignments):
    """The whole, and its parts in two or three words, are the same or refused alike."""
    ways = (
        lambda key, value: [f"{key}={value}"],
        lambda key, value: [key, "=", value],
        lambda key, value: [key, f"={value}"],
        lambda key, value: [f"{key}={value}"] if "=" in value else [f"{key}=", value],
    )

    def outcome(words):
        try:
            return load(None, words)
        except UserError as error:
            return str(error)

    joined = [f"{key}={value}" for key, value, _ in assignments]
    assert outcome(joined) == outcome([w for k, v, way in assignments for w in ways[way](k, v)])


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(st.fixed_dictionaries({axis: SIZES for axis in (
    "tensor", "context", "pipeline", "expert", "expert_tensor", "data_replicate"
)}))  # fmt: skip
def test_no_smaller_world_has_a_layout(sizes):
    parallel = ParallelConfig(**sizes)
    fewest = count_fewest_ranks(parallel)
    model_ranks = parallel.tensor * parallel.context * parallel.pipeline
    assert resolve_axis_sizes(parallel, fewest)[1] == []
    assert all(
        resolve_axis_sizes(parallel, world)[1] for world in range(model_ranks, fewest, model_ranks)
    )
    with_data = parallel.model_copy(update={"data": fewest // model_ranks})
    assert count_fewest_ranks(with_data) == fewest


NAMES = st.from_regex(r"[a-z_]{1,12}(\.[a-z_0-9]{1,12}){0,2}", fullmatch=True)
EDITED = st.tuples(st.sampled_from(sorted(get_config_keys())), st.integers(0, 30)).map(
    lambda pair: pair[0][: pair[1]] + pair[0][pair[1] + 1 :]
)


@given((NAMES | EDITED).filter(lambda name: name not in get_config_keys() and name.strip(".")))
def test_an_unknown_key_suggests_a_known_one_or_none(name):
    for ask in (lambda: explain(name), lambda: load(None, [f"{name}=1"])):
        with pytest.raises(UserError) as refusal:
            ask()
        text = str(refusal.value)
        if text.endswith("; pretrain_gpt.py --help all lists all keys"):
            assert find_nearest_keys(name) == ""
        elif "has no keys beneath it" not in text and translate_setting(name) is None:
            suggested = text.rpartition("did you mean ")[2].rstrip("?").replace(" or ", ", ")
            known = {
                *get_config_keys(),
                *(f"data.sources.{field}" for field in DataSourceConfig.model_fields),
                *(f"data.phases.{field}" for field in PhaseConfig.model_fields),
                *(f"model.blocks.{field}" for field in BlockConfig.model_fields),
            }
            known |= {
                f"model.blocks.{part}.{field}"
                for part, kinds in PARTS.items()
                for kind in kinds
                for field in kind.model_fields
            }
            assert known.issuperset(suggested.split(", "))


@given(st.sampled_from(sorted(k for k in get_config_keys() if len(k) > 8)), st.integers(0, 40))
def test_one_lost_letter_in_a_key_is_found(name, place):
    place = name.index(".") + 1 + place % (len(name) - name.index(".") - 1) if "." in name else 0
    wrong = name[:place] + name[place + 1 :]
    if wrong not in get_config_keys():
        with pytest.raises(UserError, match=rf"did you mean (.* or )?{name}( or .*)?\?"):
            explain(wrong)


@given(st.integers(0, 30))
def test_a_mistake_is_reported_on_its_line(file, before):
    file.write_text("# comment\n" * before + "train:\n  steps: none\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"config\.yaml:{before + 2}: train\.steps=none"):
        load(str(file))


WORDS = ["train", "steps", "data.sources", "null", "extends", "5", "!!int ", "é", "<<"]
PIECES = st.sampled_from([*WORDS, *"[]{}'\"#|>%@\t\n-", ": ", "  ", "- ", "? ", "&a ", "*a", "---"])


@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(PIECES, max_size=25).map(lambda parts: "".join(parts).encode()),
    )
)
def test_any_bytes_are_a_config_or_a_user_error(file, raw):
    file.write_bytes(raw)
    try:
        load(str(file), [f"run.dir={raw.decode('latin-1')}", raw.decode("latin-1")])
    except UserError as error:
        assert "mistake" in str(error)
