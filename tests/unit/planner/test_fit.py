"""What fits: every shipped config and every command of the documents on the machine that it names;
and what is offered instead of a run that does not fit."""

import re
import shlex
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
from slow_cases import mark_slow, slow

from megaframe.config import load
from megaframe.config.load import resolve_config_path
from megaframe.config.registry import Registry, use_registry
from megaframe.extensions import load_with_extensions
from megaframe.hardware.cluster import DEFAULT, load_cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import get_family_constants
from megaframe.planner.fit import compute_fit, suggest_changes
from megaframe.planner.layout_search import find_fastest
from megaframe.planner.peak_memory import resolve_recompute_blocks
from megaframe.resilience.elastic import fit_layout
from megaframe.validate.run import find_mistakes

ROOT = Path(__file__).resolve().parents[3]
CLUSTERS = {"H100": "h100-ib", "H200": "h200-ib", "CPU": "cpu"}
"""A cluster of each chip that shipped configs name."""
CONFIGS = sorted(path for path in ROOT.glob("configs/**/*.yaml") if "clusters" not in path.parts)


def explain_misfit(config, world, cluster):
    """Return why a config cannot run on `world` chips of a cluster; empty if it can, with room."""
    if config.faults.elastic:
        config, world = fit_layout(config, world)
    if config.parallel.auto:
        constants = get_family_constants(cluster.chip.family)
        return (
            []
            if find_fastest(SearchSpace(config, world, cluster), constants)
            else ["no layout fits"]
        )
    wrong = find_mistakes(config, world, data=False)
    if wrong:
        return wrong
    layout = Layout.from_parallel(config.parallel, world)
    fit = compute_fit(resolve_recompute_blocks(config, layout, cluster.chip), layout, cluster.chip)
    return [str(fit)] if fit.is_tight else []


def read_machine(path):
    """Return the number of chips and the cluster in the head of a shipped config, and the command
    that it gives for them."""
    ((count, chip, command),) = re.findall(
        r"^# (\d+) x (\w+): (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(count), CLUSTERS[chip], command


@pytest.mark.parametrize(
    "path", mark_slow(CONFIGS, except_for=CONFIGS[::4]), ids=lambda path: path.stem
)
def test_a_shipped_config_fits_on_the_machine_that_it_names(path):
    count, cluster, command = read_machine(path)
    parsed = Command(command)
    assert parsed.config == str(path.relative_to(ROOT)) and parsed.world == count
    assert explain_misfit(load(str(path)), count, load_cluster(cluster)) == []


def test_a_misfit_is_explained_in_bytes():
    old = ["parallel.zero=0", "train.recompute=none"]
    (misfit,) = explain_misfit(load("llama3-8b", old), 8, load_cluster("h100-ib"))
    assert re.match(r"rank 0 needs 175.1 GiB by the plan, and its device \(h100\) has 80.0", misfit)


class Command:
    """A command line that names a config: on how many ranks of which cluster it runs."""

    COUNTS = (
        "WORLD_SIZE",
        *("--nnodes", "--nproc-per-node", "PET_NNODES", "PET_NPROC_PER_NODE"),
        *("--nodes", "--gpus-per-node", "--hosts", "--ranks", "--gpus"),
    )
    """What stands before numbers whose product is the number of ranks."""

    def __init__(self, line):
        words = shlex.split(line)
        after = dict(pairwise(words))
        after |= dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        self.config, self.searches = after["--config"], "--search" in words
        # What a sweep tries is a list of values, not one.
        arguments = words[words.index("--") :] if "--sweep" in words else words
        self.overrides = [word for word in arguments if re.match(r"[a-z]+\.[a-z_.]+=", word)]
        self.world = prod(int(after[n]) for n in self.COUNTS if after.get(n, "").isdigit())
        with use_registry(Registry()):
            config = load_with_extensions(self.config, self.overrides)
        self.cluster = config.parallel.cluster
        if self.cluster is None and "plan" in line.partition("--config")[0]:
            self.cluster = after.get("--cluster", DEFAULT)


def list_documented_commands():
    """Yield every command of the documents that names a shipped config. After a `!` is one that is
    to fail."""
    for document in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        for block in re.findall(r"```\w*\n(.*?)```", document.read_text(), re.DOTALL):
            for line in block.splitlines():
                named = re.search(r"--config (?:configs/)?([\w./-]+?)(?:\.yaml)?(?= |$)", line)
                if named and (ROOT / f"configs/{named[1]}.yaml").exists():
                    # The commands of the README show what the others do to the same configs.
                    # Searches take most of the time.
                    quick = document.stem == "README" and "--search" not in line
                    case = pytest.param if quick else slow
                    yield case(line.lstrip("$# "), id=f"{document.stem}: {line[:80]}")


@pytest.mark.parametrize("line", list(list_documented_commands()))
def test_a_documented_command_fits_on_the_machine_that_it_names(line):
    command = Command(line)
    with use_registry(Registry()):
        config = load_with_extensions(command.config, command.overrides)
    name = command.cluster or read_machine(Path(resolve_config_path(command.config)))[1]
    cluster = load_cluster(name)
    if command.searches:
        constants = get_family_constants(cluster.chip.family)
        fixed = {key.split(".")[1]: 2 for key in command.overrides if key == "parallel.tensor=2"}
        assert find_fastest(SearchSpace(config, command.world, cluster, fixed), constants)
    else:
        assert (explain_misfit(config, command.world, cluster) == []) == (line[0] != "!")


def test_all_kinds_of_commands_are_found():
    text = "\n".join(param.values[0] for param in list_documented_commands())
    for words in ("--dry-run", "torchrun", "node.py", "slurm.sh", "ray_train", "plan.py", "netlab"):
        assert words in text
    assert len(list(list_documented_commands())) > 30


# ---------------------------------------------------------------------------------- what is offered

SEARCHED = [
    *("parallel.pipeline=2", "parallel.schedule=search"),
    *("train.global_batch=64", "train.microbatch=8"),
]
# Every kind of offer; those of 64 GPUs take most of the time.
TIGHT = (
    ("llama3-8b", 8, "h100-ib", ["parallel.zero=0"], "parallel.zero=2"),
    ("llama3-8b", 8, "h100-ib", ["parallel.zero=1", "train.microbatch=4"], "parallel.zero=3"),
    ("gpt2-1.5b", 8, "h100-ib", ["train.microbatch=64"], "train.microbatch="),
    ("gpt2-1.5b", 1, "a100-40gb-roce", ["train.microbatch=16"], "train.recompute_blocks=auto"),
    slow("mistral-7b", 8, "a100-40gb-roce", [], "train.recompute_blocks=auto"),
    slow("llama2-70b", 64, "h100-ib", ["train.microbatch=2"], "train.recompute"),
    ("llama2-7b", 8, "h100-ib", SEARCHED, ""),
    slow("mixtral-8x7b", 64, "h100-ib", ["parallel.zero=0"], "parallel.zero="),
)


@pytest.mark.parametrize(("name", "gpus", "cluster", "keys", "first"), TIGHT)
def test_what_is_offered_fits_when_it_is_pasted(name, gpus, cluster, keys, first):
    machine = load_cluster(cluster)
    config = load(name, keys)
    assert find_mistakes(config, gpus, data=False) == []
    assert not compute_fit(config, Layout.from_parallel(config.parallel, gpus), machine.chip).fits
    offers = list(
        suggest_changes(
            SearchSpace(config, gpus, machine), get_family_constants(machine.chip.family)
        )
    )
    assert offers and offers[0].startswith(first)
    for offer in offers:
        pasted = shlex.split(offer.rpartition(": ")[0])
        assert all(word.startswith(("parallel.", "train.", "optim.")) for word in pasted), offer
        assert explain_misfit(load(name, [*keys, *pasted]), gpus, machine) == [], offer


def test_smaller_changes_come_first_and_none_includes_another():
    machine = load_cluster("h100-ib")
    config = load("llama3-8b", ["parallel.zero=1", "train.recompute=none"])
    offers = list(suggest_changes(SearchSpace(config, 8, machine), get_family_constants("h100")))
    assert [offer.partition(":")[0] for offer in offers[:2]] == [
        "parallel.zero=2",
        "train.recompute_blocks=auto",
    ]
    assert "parallel.pipeline=2 " in offers[2] and len(offers) == 3


def test_where_nothing_fits_larger_machines_are_offered():
    machine = load_cluster("h100-ib")
    config = load("llama3-70b", ["parallel.pipeline=1", "parallel.tensor=8", "parallel.chunks=1"])
    offers = list(suggest_changes(SearchSpace(config, 8, machine), get_family_constants("h100")))
    assert offers[0].startswith("16 GPUs of h100-ib: ") and "an hour" in offers[0]
