"""Extensions: loaded because a config names them, with sections like our own."""

import subprocess
import sys

import pytest
import yaml

from megaframe.checkpoint.train_state import check_same_run, describe_resumption
from megaframe.config import describe_all_keys, dump, explain, load
from megaframe.config.keys import get_config_keys
from megaframe.config.optim import OptimConfig
from megaframe.config.parts import ROLES
from megaframe.config.registry import Extension, Registry, get_registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import load_with_extensions, refuse_missing_extensions
from megaframe.optim.lr_schedule import compute_learning_rate
from megaframe.validate.run import find_mistakes

PART = '''
from typing import Literal
from megaframe.extensions import SchedulePart

class Half(SchedulePart):
    kind: Literal["half"] = "half"
    """Half of the rate."""
    factor: float = 0.5
    """What is left of it."""

    def compute_share(self, update, warmup, steps):
        return self.factor

def register(registry):
    registry.register(Half)
'''


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()) as registry:
        yield registry


@pytest.fixture
def write(tmp_path):
    def write(text, name="own.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def load_own(*names, options=()):
    return load_with_extensions(None, [f"run.extensions=[{', '.join(names)}]", *options])


def refuse(*names, options=()):
    with pytest.raises(UserError) as error:
        load_own(*names, options=options)
    return str(error.value)


def test_a_part_is_given_by_its_name_or_with_its_keys(write):
    path = write(PART)
    config = load_own(path, options=["optim.schedule=half", "optim.lr=0.01"])
    assert compute_learning_rate(config.optim, 5, 10) == 0.005
    config = load_own(path, options=["optim.schedule={kind: half, factor: 0.25}", "optim.lr=0.01"])
    assert compute_learning_rate(config.optim, 5, 10) == 0.0025
    assert yaml.safe_load(dump(config))["optim"]["schedule"] == {"kind": "half", "factor": 0.25}
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert hash(config) == hash(config.model_copy())


def test_our_own_names_mean_the_same_with_an_extension(write):
    plain = load(None)
    config = load_own(write(PART))
    assert config.model_copy(update={"run": plain.run}) == plain


def test_only_the_extensions_that_this_config_names_are_known(write):
    load_own(write(PART))
    with pytest.raises(UserError, match=r"optim.schedule=half: takes one of constant"):
        load_with_extensions(None, ["optim.schedule=half"])


def test_a_config_that_is_not_the_user_s_own_loads_nothing(write):
    """`load` reads configs in folders of runs, too."""
    path = write("raise SystemError('was run')")
    assert load(None, [f"run.extensions=[{path}]"]).run.extensions == (path,)


def test_keys_are_documented_and_checked_like_our_own(write):
    path = write(PART)
    load_own(path)
    text = explain("optim.schedule")
    assert "optim.schedule[half].factor\n  What is left of it.\n  Takes a number." in text
    assert "half" in describe_all_keys()
    message = refuse(path, options=["optim.schedule={kind: half, factor: much}"])
    assert "optim.schedule.factor=much: takes a number" in message
    message = refuse(path, options=["optim.schedule={kind: half, facter: 1}"])
    assert "optim.schedule.facter: unknown key; did you mean optim.schedule.factor?" in message
    message = refuse(path, options=["optim.schedule=haf"])
    assert "takes one of constant, cosine, linear, wsd, inverse_sqrt, half, or keys" in message


MIXER = '''
from typing import Literal
from megaframe.extensions import MixerPart

class Mine(MixerPart):
    kind: Literal["mine"] = "mine"
    """Mixes nothing."""
    width: int = 3
    """Of nothing."""

    def describe(self, model, output_std):
        raise AssertionError("is not asked")

def register(registry):
    registry.register(Mine)
'''


def test_the_keys_of_mixers_are_listed_and_checked_beside_our_own(write):
    path = write(MIXER)
    load_own(path)
    text = explain("model.blocks")
    kinds = (
        "attention, latent, compressed_attention, gated_delta_net, gated_short_convolution, "
        "mamba2, none or mine"
    )
    kinds = f"keys of a part, of kind {kinds}, or only its kind"
    assert f"Takes {kinds}." in " ".join(text.split())
    assert "model.blocks.mixer[mine].width\n  Of nothing.\n  Takes a whole number." in text
    assert "model.blocks.mixer[attention].window\n  Sliding window" in text
    for value in ("min", "{kind: min}", "3"):
        message = refuse(path, options=[f"model.blocks=[{{mixer: {value}}}]"])
        assert f"model.blocks.0.mixer={value}: takes {kinds}" in message
    message = refuse(path, options=["model.blocks=[{mixer: {kind: mine, width: much}}]"])
    assert "model.blocks.0.mixer.width=much: takes a whole number" in message
    message = refuse(path, options=["model.blocks=[{mixer: {kind: mine, widht: 1}}]"])
    assert "model.blocks.0.mixer.widht: unknown key; did you mean" in message


DESCRIPTION = """
        from dataclasses import dataclass
        from megaframe.architecture.layer import MixerDescription, SavedActivations

        @dataclass(frozen=True, kw_only=True)
        class Nothing(MixerDescription):
            sizes: object = ()
            name = "nothing"
            parts = {}

            def count_saved(self, parallel, recompute):
                return SavedActivations()

            def make_layer(self, name, run):
                raise AssertionError("is not built")

        return Nothing()
"""


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        ("return Nothing()", "return 3", "returns int, which is no MixerDescription"),
        ("return Nothing()", "return 1 / 0", ":27: ZeroDivisionError: division by zero"),
        ("make_layer", "build", "returns Nothing, which lacks make_layer(name, run)"),
        ("count_saved", "count", "TypeError: Can't instantiate abstract class Nothing"),
        ("Nothing()", "Nothing(sizes=[1])", "be compared by value (unhashable type: 'list')"),
        ("parts = {}", "parts = {}; context_kinds = ('ring',)", None),
    ],
)
def test_what_a_mixer_describes_wrongly_is_said(replaced, by, message, write):
    failing = '        raise AssertionError("is not asked")\n'
    text = MIXER.replace(failing, DESCRIPTION.lstrip("\n").replace(replaced, by))
    config = load_own(write(text), options=["model.blocks=[{mixer: mine}]", "model.vocab=64"])
    if message is None:
        assert find_mistakes(config, 1, data=False) == []
        context = load(None, ["model.vocab=64"]).parallel.model_copy(update={"context": 2})
        assert not find_mistakes(config.model_copy(update={"parallel": context}), 2, data=False)
        return
    with pytest.raises(UserError) as error:
        find_mistakes(config, 1, data=False)
    assert message in str(error.value) and "mine: Mine.describe" in str(error.value)


def test_a_mixer_that_needs_whole_samples_says_so(write):
    text = MIXER.replace('        raise AssertionError("is not asked")\n', DESCRIPTION.lstrip("\n"))
    options = ["model.blocks=[{mixer: mine}]", "model.vocab=64", "parallel.context=2"]
    (message,) = find_mistakes(load_own(write(text), options=options), 2, data=False)
    assert "model.blocks.0: parallel.context=2 divides samples, which Nothing cannot" in message


def test_a_block_may_name_a_kind_instead_of_its_keys():
    keys = ["model.moe={}", "model.latent={kv_rank: 8, head_dim: 8, rotary_dim: 8, value_dim: 8}"]
    short, long = (
        load(None, [*keys, f"model.blocks=[{{mixer: {mixer}, feed_forward: {feed_forward}}}]"])
        for mixer, feed_forward in (("latent", "moe"), ("{kind: latent}", "{kind: moe}"))
    )
    assert short == long


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("import nothing_of_this_name", ["fails to import", 'own.py", line 1', "ModuleNotFound"]),
        ("def register(registry:", ["fails to import", "SyntaxError"]),
        ("x = 1", ["has no function register(registry)"]),
        ("def register(registry):\n    1 / 0", ["register fails", "ZeroDivisionError"]),
        ("def register(registry):\n    registry.register(3)", ["own.py:2: registers 3"]),
        (PART + "    registry.register(Half)", ["own.py:16: registers the schedule", ":15 has"]),
        (PART.replace("half", "wsd"), ["own.py:15", "name of megaframe's own", "optim.schedule"]),
        (PART.replace("compute_share", "compute"), ["Half lacks compute_share"]),
        ("import torch as t\nt.distributed.barrier()", ["own.py:2: uses torch.distributed"]),
        ("from torch.distributed import barrier", ["own.py:1: uses torch.distributed"]),
        ("def f():\n    from torch import distributed", ["own.py:2: uses torch.distributed"]),
        ("import torch.distributed as d", ["own.py:1: uses torch.distributed"]),
    ],
)
def test_what_is_wrong_with_an_extension_is_said_with_its_place(text, messages, write):
    actual = refuse(write(text))
    assert actual.startswith("command line: run.extensions: ")
    for message in messages:
        assert message in actual
    assert not get_registry().parts


def test_a_name_of_two_extensions_is_refused(write):
    first, second = write(PART), write(PART, "other.py")
    message = refuse(first, second)
    assert "other.py:15: registers the schedule half" in message and "own.py:15 has" in message
    assert "is named twice" in refuse(first, first)


def test_the_line_of_the_config_is_named(write, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("run:\n  extensions:\n    - missing.py\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"run.yaml:3: run.extensions: missing.py: there is no"):
        load_with_extensions(str(config))
    assert "neither a file nor a package" in refuse("missing_package")


def test_a_package_is_an_extension(tmp_path, monkeypatch):
    package = tmp_path / "own_schedules"
    package.mkdir()
    (package / "__init__.py").write_text(PART, encoding="utf-8")
    (package / "more.py").write_text("x = 1", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_own("own_schedules", options=["optim.schedule=half"]).optim.schedule.name == "half"
    (first,) = get_registry().extensions
    (package / "more.py").write_text("x = 2", encoding="utf-8")
    load_own("own_schedules")
    (second,) = get_registry().extensions
    assert first.digest != second.digest


def test_our_names_are_those_of_the_schema():
    for role, name in (("optimizer", "name"), ("schedule", "schedule")):
        listed = get_config_keys()[f"optim.{name}"].allowed
        assert listed == "one of " + ", ".join(ROLES[role].ours)
        assert OptimConfig.model_fields[name].default in ROLES[role].ours


def test_extensions_are_planned_for_without_torch(write):
    path = write(PART)
    code = (
        "import sys\nfrom megaframe.extensions import load_with_extensions\n"
        "from megaframe.planner.memory import PlannedRank\n"
        f"load_with_extensions(None, ['run.extensions=[{path}]', 'optim.schedule=half'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_resume_without_an_extension_is_refused_and_a_changed_one_is_said(write):
    path = write(PART)
    config = load_own(path)
    (extension,) = get_registry().extensions
    saved = {extension.name: extension.digest}
    check_same_run(config, config, path, saved)
    assert len([*describe_resumption(1, "x", (), saved)]) == 1
    changed = {extension.name: "0" * 64}
    lines = [*describe_resumption(1, "x", (), changed)]
    assert f"warning: extension {path} has changed" in lines[1]
    with use_registry(Registry()), pytest.raises(UserError) as error:
        check_same_run(config, config, path, saved)
    assert f"with 1 extension, which is not loaded here: {path}" in str(error.value)
    assert f"run.extensions=[{path}]" in str(error.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["own.py"], "x is of a run with 1 extension, which is not loaded here: own.py; if you "),
        (["own.py", "known"], "x is of a run with 2 extensions, of which 1 is not loaded here: ow"),
        (["own.py", "b.py"], "x is of a run with 2 extensions, of which 2 are not loaded here: ow"),
    ],
)
def test_missing_extensions_are_counted_in_good_english(names, text):
    get_registry().extensions.append(Extension("known", "0"))
    with pytest.raises(UserError) as error:
        refuse_missing_extensions(names, "x")
    assert str(error.value).startswith(text)
