"""A run whose GPUs have too little memory is refused by the entry before anything is built."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow_cases import slow
from tool_process import run_tool

from megaframe.config import load
from megaframe.config.section import MOST
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.training import auto_layout, memory_check
from megaframe.training.memory_check import check_memory, judge_memory
from megaframe.validate.run import validate_config

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask here")
OLD = ["parallel.zero=0", "train.recompute=none"]


def run_entry(*arguments):
    process = run_tool("pretrain_gpt.py", *arguments)
    return process.returncode, process.stdout, process.stderr


@pytest.fixture
def gpu(monkeypatch):
    """gpu(gib, name): let torch find a GPU with so much memory."""

    def found(gib, name="NVIDIA H100 80GB HBM3"):
        properties = SimpleNamespace(
            total_memory=int(gib * 2**30), name=name, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    return found


def test_a_dry_run_for_a_cluster_that_is_too_small_says_what_fits():
    command = ["--config", "llama3-8b", "--dry-run", "--gpus", "8", "parallel.cluster=h100-ib"]
    status, message, wrong = run_entry(*command, *OLD)
    assert status == 2 and "memory per rank" in message
    first, changes = message.splitlines()[0], message.splitlines()[1:4]
    assert first.startswith("does not fit in memory: rank 0 needs 175.1 GiB by the plan")
    assert "has 80.0 GiB: 95.1 GiB too much (" in first
    assert any(line.startswith("  parallel.zero=2: 75.9 GiB") for line in changes)
    assert "error: does not fit in memory: rank 0 needs 175.1 GiB by the plan, and its" in wrong
    assert "    parallel.zero=2: 75.9 GiB" in wrong and "--force" in wrong
    status, message, wrong = run_entry(*command, *OLD, "--force")
    assert (status, wrong) == (0, "")
    assert message.splitlines()[-1].startswith(
        "warning: started by --force without enough memory: "
    )
    status, message, wrong = run_entry(*command)
    assert (status, wrong) == (0, "") and "warning" not in message
    assert re.fullmatch(
        r"fits in memory: rank 0 needs 64\.9 GiB by the plan, and its device \(h100\) has "
        r"80\.0 GiB: 15\.1 GiB to spare \(.*",
        message.splitlines()[0],
    )


@pytest.fixture
def dry(monkeypatch, call_main):
    """dry(*words) -> what a dry run in this process prints, without and with its errors."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*words):
        _, *printed = call_main(pretrain_gpt.main, "--dry-run", *words)
        return "".join(printed)

    return run


@without_gpu
def test_gpus_are_planned_for_where_there_are_none(dry):
    """Without a name they are those of the default cluster, and the dry run says so."""
    output = dry("--gpus", "8", "--config", "llama3-8b")
    verdict, note = output.splitlines()[:2]
    assert verdict.startswith("fits in memory: rank 0 needs 64.9 GiB")
    assert note.startswith("there is no GPU here that could be asked for its name and memory: ")
    assert "cluster h100-ib is assumed" in note and "layout      8 ranks = data 8\n" in output


def test_ranks_that_a_launcher_started_plan_for_all_of_them_and_the_first_prints(dry, monkeypatch):
    command = ["--config", "llama3-8b", "parallel.cluster=h100-ib"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert dry(*command) == ""
    monkeypatch.setenv("RANK", "0")
    assert "layout      8 ranks = data 8\n" in dry(*command)


@pytest.mark.parametrize(("name", "fewest"), [slow("llama3-70b", 16), ("mixtral-8x7b", 8)])
def test_without_a_number_the_layout_has_as_few_ranks_as_it_can(dry, name, fewest):
    """Four tensor times four pipeline ranks, and for the other a rank for each eighth of experts;
    neither fits on so few, and the last lines say what does."""
    output = dry("--config", name, "parallel.cluster=h100-ib")
    assert f"layout      {fewest} ranks = " in output
    verdict = output.partition("error: does not fit in memory: ")[2].splitlines()
    assert verdict[1] == "  nearest changes that fit, with their memory and step by the plan:"
    assert verdict[2].startswith("    ") and verdict[-1] == "  or run anyway with --force"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--gpus", "0"], "--gpus 0 is not a number of GPUs; use 1 or more"),
        (["--gpus", "-3"], "--gpus -3 is not a number of GPUs; use 1 or more"),
        (["--gpus", "x"], "argument --gpus: invalid int value: 'x'"),
        (["--gpus", "2", "run.device=cpu"], "--gpus 2 plans for GPUs, but run.device=cpu"),
        (["--gpus", "3"], "train.global_batch=16"),
    ],
)
def test_a_number_of_gpus_that_cannot_be_planned_for(dry, words, reason):
    output = dry("--config", "demo", "model.vocab=100", *words)
    assert f"error: {reason}" in output or reason in output.splitlines()[-1]
    assert "memory per rank" not in output and "Traceback" not in output


def test_a_run_takes_no_number_of_gpus(call_main):
    status, _, message = call_main(pretrain_gpt.main, "--config", "demo", "--gpus", "8")
    assert status == 2 and message.startswith("error: --gpus 8 needs --dry-run: ")
    assert "torchrun --nproc-per-node 8 " in message


def test_a_dry_run_reads_a_tokenizer_only_for_the_size_of_the_vocabulary(dry):
    nowhere = ["--config", "demo", "data.tokenizer=sentencepiece:nowhere/tokenizer.model"]
    assert "fits in memory: " in dry(*nowhere, "run.device=cpu")
    refused = dry(*nowhere, "model.vocab=null")
    assert refused.startswith("error: cannot read tokenizer file nowhere/tokenizer.model")


@pytest.fixture
def host(monkeypatch):
    """host(gib, swap): let this machine have so much memory and swap."""

    def found(gib, swap=0.0):
        monkeypatch.setattr(auto_layout, "read_host_memory", lambda: int(gib * 2**30))
        monkeypatch.setattr(memory_check, "read_host_swap", lambda: int(swap * 2**30))

    return found


def test_a_host_that_is_too_small_gets_a_verdict_and_what_fits(dry, host):
    command = ["--config", "gpt2-124m", "run.device=cpu", "train.microbatch=32"]
    host(8)
    output = dry(*command)
    verdict = output.splitlines()
    assert verdict[0].startswith("does not fit in memory: rank 0 needs ")
    assert "and the host has 8.0 GiB: 5.3 GiB too much (" in verdict[0]
    assert verdict[1] == "nearest changes that fit, with their memory and step by the plan:"
    assert verdict[2].startswith("  train.")
    refused = output[output.index("error: ") :]
    assert verdict[0] in refused and "run anyway with --force" in refused
    output = dry(*command, "--force")
    assert output.splitlines()[0] == verdict[0]
    assert output.splitlines()[-1].startswith("warning: started by --force without enough memory")


def judge(config, layout):
    return judge_memory(config, layout, auto_layout.find_cluster(config.parallel, config.run))


def test_a_gpu_is_asked_for_its_memory(gpu):
    config, layout = load("llama3-8b"), Layout(data=8)
    gpu(79.1)
    assert check_memory(config, layout) == []
    gpu(67)
    (line,) = check_memory(config, layout)
    assert line.startswith("warning: rank 0 needs 64.5 GiB") and "good to a few percent" in line
    gpu(60)
    with pytest.raises(UserError, match=r"needs 6\d.\d GiB by the plan, .* has 60.0 GiB") as error:
        check_memory(config, layout)
    assert "parallel.zero=3: " in str(error.value)
    (line,) = check_memory(config, layout, force=True)
    assert line.startswith("warning: started by --force without enough memory: rank 0 needs 6")


def test_every_rank_says_the_same(gpu, monkeypatch):
    gpu(60)
    texts = set()
    for rank in (0, 1, 7):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(UserError) as error:
            check_memory(load("llama3-8b"), Layout(data=8))
        texts.add(str(error.value))
    assert len(texts) == 1


def test_a_run_is_not_checked_for_another_machine_but_a_dry_run_is(gpu):
    config, layout = load("llama3-8b", ["parallel.cluster=b200-ib", *OLD[1:]]), Layout(data=8)
    gpu(60)
    with pytest.raises(UserError, match=r"has 60\.0 GiB"):
        check_memory(config, layout)
    (line,) = judge(config, layout).lines
    assert line.startswith("fits in memory: ") and "(b200)" in line


def test_of_a_chip_of_unknown_speed_only_memory_is_told(gpu):
    gpu(24, "Some Accelerator")
    with pytest.raises(UserError) as error:
        check_memory(load("llama3-8b"), Layout(data=8))
    lines = str(error.value).splitlines()
    assert "has 24.0 GiB" in lines[0] and lines[-1] == "  or run anyway with --force"
    offers = lines[2:-1]
    assert offers and all(re.search(r"=\S+: \d+\.\d GiB$", line) for line in offers)


def test_a_host_is_refused_only_if_tensors_exceed_memory_and_swap(host):
    """What else a process takes there is only estimated, and swap extends it."""
    config = load("gpt2-124m", ["run.device=cpu", "train.microbatch=4"])
    host(1000)
    fit = judge(config, Layout()).fit
    tensors = fit.tensors / 2**30
    for memory, swap in ((tensors * 1.01, 0), (tensors / 2, tensors * 0.6)):
        host(memory, swap)
        (line,) = check_memory(config, Layout())
        assert line.startswith("warning: may not fit in memory: rank 0 needs ")
    host(tensors / 2, tensors * 0.4)
    with pytest.raises(UserError, match="does not fit in memory: rank 0 needs"):
        check_memory(config, Layout())
    (line,) = check_memory(config, Layout(), force=True)
    assert line.startswith("warning: started by --force")


def test_the_ranks_of_a_host_are_counted_together(host, monkeypatch):
    config = load("gpt2-1.5b", ["run.device=cpu"])
    host(1000)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = judge(config, Layout(data=4)).fit
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    both = judge(config, Layout(data=4)).fit
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert judge(config, Layout(data=4)).fit.tensors == alone.tensors  # may be apart
    monkeypatch.delenv("WORLD_SIZE")
    assert judge(config, Layout(data=4)).fit.tensors == 4 * alone.tensors
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (both.rank, both.ranks, both.tensors) == (0, 2, 2 * alone.tensors)
    host(4)
    with pytest.raises(
        UserError, match=r"ranks 0 to 1 of a host need .* and the host has 4\.0 GiB"
    ):
        check_memory(config, Layout(data=4))
    small = load("demo", ["run.device=cpu", "train.microbatch=1"])
    assert check_memory(small, Layout(data=4)) == []
    # Stages differ: the host with the first ones needs more than the other.
    first = judge(config, Layout(pipeline=4)).fit
    assert first.rank == 0 and first.ranks == 2


@pytest.mark.parametrize("size", [MOST, MOST + 1, 2**63, 10**30])
@pytest.mark.parametrize(
    "key", ["model.ffn", "model.vocab", "train.seq", "train.global_batch", "train.steps"]
)
def test_absurd_sizes_get_a_verdict_or_one_error(key, size):
    """None is too much for numbers of numpy, whose integers have 64 bits."""
    try:
        config = load(None, ["model.vocab=257", "run.device=cpu", f"{key}={size}"])
        validate_config(config, 1, data=False)
        (line, *_) = judge(config, Layout()).lines
    except UserError as error:
        most = "65536" if size == MOST else "1,000,000,000,000"
        assert key in str(error) and f"at most {most}" in str(error)
    else:
        assert size == MOST and "fit" in line
