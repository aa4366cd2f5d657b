"""The benchmark contenders that are megaframe itself: single layers give the same answer as plain
PyTorch, the loader reads, and the command of each whole run has a config that a run accepts."""

import contextlib
import io
import json
import math
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tolerances import estimate_growth
from torch.nn import functional

from megaframe.config import load
from megaframe.validate.run import validate_config

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmarks" / name) for name in ("cpu", "network", "peers")]
import context_ours  # noqa: E402
import data_cpu  # noqa: E402
import experts_loop  # noqa: E402
import experts_ours  # noqa: E402
import loader  # noqa: E402
import loader_ours  # noqa: E402
import netlab_peers  # noqa: E402
import pipeline_cpu  # noqa: E402
import shakespeare  # noqa: E402
import tensor_cpu  # noqa: E402
import train_cpu  # noqa: E402
from context_workload import draw_own_parts  # noqa: E402
from experts_workload import SHAPES, ExpertsShape  # noqa: E402


def compute_tolerance(length):
    """Return the relative tolerance of a mean square of the results of four successive products,
    each with sums of `length` terms."""
    return 2 * estimate_growth(4 * length, torch.float32)


def run_contender(main, arguments, monkeypatch, capsys):
    """Return what a contender prints last, read as JSON."""
    monkeypatch.setattr(sys, "argv", [main.__module__, *arguments])
    main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_experts_give_the_answer_of_a_loop(monkeypatch, capsys):
    monkeypatch.setitem(
        SHAPES, "tiny", ExpertsShape(tokens=96, hidden=32, width=48, experts=8, top_k=2)
    )
    arguments = ["--shape", "tiny", "--precision", "fp32", "--steps", "1"]
    own_result, plain = (
        run_contender(module.main, arguments, monkeypatch, capsys)["loss"]
        for module in (experts_ours, experts_loop)
    )
    assert own_result == pytest.approx(plain, rel=compute_tolerance(96))


def answer_of_a_ring(ranks, seq):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        context_ours.train(Namespace(ranks=ranks, seq=seq, precision="fp32", steps=1))
    return json.loads(output.getvalue().splitlines()[-1])["loss"]


def test_a_ring_gives_the_answer_of_whole_attention(pool):
    ranks, seq = 2, 64
    parts = draw_own_parts(Namespace(ranks=1, seq=seq, precision="fp32"), 0)
    *qkv, d_out = (part.double().transpose(1, 2) for part in parts)
    query, key, value = leaves = [part.requires_grad_() for part in qkv]
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    results = (out.detach(), *torch.autograd.grad(out, leaves, d_out))
    reference = math.fsum(float(output.square().mean()) for output in results)
    for actual in pool.run(ranks, answer_of_a_ring, ranks, seq):
        assert actual == pytest.approx(reference, rel=compute_tolerance(seq))


@pytest.mark.parametrize("options", loader.VARIANTS.values(), ids=loader.VARIANTS)
def test_the_loader_reads(options, corpus, monkeypatch, capsys):
    arguments = ["--prefix", corpus, "--seq", "16", "--seconds", "0.01", *options]
    result = run_contender(loader_ours.main, arguments, monkeypatch, capsys)
    assert result["samples_per_second"] > 0


class Started(Exception):
    """A contender has started a process. Arguments: its command, and the size of its world."""


def start(command, *, env=None, **_):
    raise Started(list(command), int((env or {}).get("WORLD_SIZE", 1)))


def list_whole_runs(tmp_path):
    """Yield the contenders of every comparison of whole runs."""
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 100)
    namespace = Namespace(steps=2, precision="bf16", text=text, without_ours=False)
    for peer in ("nanogpt", "megatron_python", "deepspeed_python", "huggingface_python"):
        setattr(namespace, peer, None)
    yield from shakespeare.make_contenders(namespace)
    yield from train_cpu.make_contenders(namespace, "bf16")
    yield from netlab_peers.make_contenders(namespace)
    for script, kind in ((data_cpu, "bf16"), (tensor_cpu, "fp32"), (pipeline_cpu, 2048)):
        yield from script.make_contenders(namespace, 4, kind)


def test_each_command_has_a_config_that_a_run_takes(tmp_path, monkeypatch):
    own_commands = [command for command in list_whole_runs(tmp_path) if command.ours]
    assert len(own_commands) == 2 + 2 + 6 + 4 + 1 + 1
    for one in own_commands:
        _, script, *arguments = one.command
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", [script, *arguments])
            patched.setattr(subprocess, "Popen", start)
            with pytest.raises(Started) as started:
                runpy.run_path(script, run_name="__main__")
        (_, entry, *keys), world = started.value.args
        assert Path(entry) == ROOT / "pretrain_gpt.py"
        validate_config(load(None, keys), world)
