"""The simulation of weak scaling: its events in closed form, and what each change is worth."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "prediction"))
import weak_scaling  # noqa: E402


@pytest.mark.parametrize("count", [1, 4, 32])
def test_equal_buckets_take_what_the_closed_form_says(count):
    """Hidden: the last bucket is exposed. Not hidden: all of it is, but the first computation."""
    latency, transfer = 0.01, 1.0
    seconds = [latency + transfer / count] * count
    slow, fast = 3.0, 0.02
    for compute in (slow, fast):
        ready = [compute * (n + 1) / count for n in range(count)]
        exposed = weak_scaling.compute_last_sent(ready, seconds) - compute
        hidden = compute >= count * latency + transfer
        long = latency + transfer / count
        visible_latency = count * latency + transfer - compute * (count - 1) / count
        assert exposed == pytest.approx(long if hidden else visible_latency)
        works = [compute / count] * count
        waited = weak_scaling.compute_last_computed(seconds, works) - compute
        visible_latency = count * latency + transfer + compute / count - compute
        assert waited == pytest.approx(long if hidden else visible_latency)


def test_every_change_helps_where_latency_matters(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    words = ["--models", "gpt2-1.5b", "--ranks", "256", "16384", "--latencies", "50"]
    monkeypatch.setattr(sys, "argv", ["weak_scaling.py", *words, "--write", str(out)])
    weak_scaling.main()
    assert capsys.readouterr().out.count("| gpt2-1.5b | 50 us |") == 2
    simulated = json.loads(out.read_text())
    for ranks in (256, 16384):
        by_variant = {line["variant"]: line for line in simulated if line["ranks"] == ranks}
        names = [variant.name for variant in weak_scaling.VARIANTS]
        gains = [by_variant[name]["efficiency"] for name in names]
        assert gains[0] < gains[1] <= gains[2] < gains[5]
        assert gains[3] < gains[4] < gains[5]
        assert by_variant["before"]["buckets"] == 96 and by_variant["tokens ahead"]["buckets"] < 50
    waiting = by_variant["buckets by rule"]["waiting"]
    assert 0 < waiting < 2 * 16383 * 50e-6, "the host is ahead of the device by a part of it"
    assert by_variant["tokens ahead"]["seconds"] == pytest.approx(
        by_variant["buckets by rule"]["seconds"] - waiting
    )


def test_the_page_shows_what_was_simulated():
    simulated = json.loads((ROOT / "benchmarks/results/weak_scaling.json").read_text())
    page = (ROOT / "docs/guides/plan.md").read_text(encoding="utf-8")
    page = page[page.index("### Latency, by simulation") :]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| llama3-8b |", "| gpt2-1.5b |"))
    ]
    assert len(rows) == 8
    names = [variant.name for variant in weak_scaling.VARIANTS]
    for model, latency, ranks, *cells in rows:
        variants = [
            line
            for line in simulated
            if (line["model"], f"{line['latency']:g} us", str(line["ranks"]))
            == (model, latency, ranks)
        ]
        assert [line["variant"] for line in variants] == names
        assert cells == [f"{line['efficiency']:.1%}" for line in variants]
