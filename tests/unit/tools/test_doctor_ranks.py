"""`tools/doctor.py --ranks`: what it finds with several ranks, and that a part that fails or hangs
is named and keeps no other from being done."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import doctor_parts  # noqa: E402
import doctor_transfers  # noqa: E402
from doctor_ranks import RankFinding, check_ranks, list_part_names, merge_findings  # noqa: E402


def run_doctor(names, folder, timeout=PATIENCE):
    """Do these parts on one rank of a pool."""
    doctor_parts.run(names, 0, doctor_transfers.Doctor("cpu", timeout, folder, large=2**16))


def read_lines(folder, world):
    return {
        rank: [
            json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()
        ]
        for rank in range(world)
    }


def test_every_part_finds_that_the_ranks_work_together(pool, tmp_path):
    names = ["settings", "links", "rings", "collectives", "layout: tensor", "abort"]
    pool.run(2, run_doctor, names, tmp_path)
    findings = merge_findings(read_lines(tmp_path, 2))
    assert [*dict.fromkeys(finding.part for finding in findings)] == names
    assert all(f.passed for f in findings), [str(f) for f in findings if not f.passed]
    text = "\n".join(map(str, findings))
    for phrase in ("links: 0 and 1", "rings: backwards", "collectives: all_to_all_v bfloat16"):
        assert phrase in text
    assert "differ from those of one rank by" in text


@pytest.mark.slow
def test_layouts_are_those_of_one_rank(pool, tmp_path):
    kinds = ("data, zero=3", "context, ring", "pipeline, zb-v", "experts")
    names = [f"layout: {kind}" for kind in kinds]
    assert {*names} < {*list_part_names(2)} and "layout: tensor and pipeline" in list_part_names(8)
    pool.run(2, run_doctor, names, tmp_path)
    findings = merge_findings(read_lines(tmp_path, 2))
    assert len(findings) == len(names) and all(finding.passed for finding in findings)


def test_a_finding_is_right_if_it_is_on_every_rank_that_can_tell():
    def make_line(passed, text):
        return {"part": "p", "check": "c", "passed": passed, "message": text, "numbers": {}}

    assert merge_findings({0: [make_line(True, "fine")], 1: [make_line(None, "")]})[0].passed
    assert merge_findings({0: [make_line(None, "")], 1: [make_line(True, "fine")]}) == [
        RankFinding("p", "c", True, "fine")
    ]
    wrong = merge_findings(
        {0: [make_line(True, "fine")], 1: [make_line(False, "bad")], 2: [make_line(False, "worse")]}
    )
    assert wrong == [RankFinding("p", "c", False, "bad", failed_ranks=[1, 2])]


FAULTY = """
import sys, time
import torch
sys.path.insert(0, {tools!r})
import doctor_parts, doctor_transfers

gather, shift_ring = doctor_transfers.all_gather, doctor_transfers.shift_ring

class Wrong:
    def __init__(self, pending): self._pending = pending
    def wait(self): return 0 * self._pending.wait()

def wrong(tensor, group):
    pending = gather(tensor, group)
    return Wrong(pending) if group.index == 1 and tensor.dtype == torch.int64 else pending

def hang(x, into, ring, reverse):
    if ring.index == 1:
        time.sleep(1000)
    return shift_ring(x, into, ring, reverse=reverse)

def fail(doctor):
    doctor.make_mesh(pipeline=doctor.world)
    if doctor.rank == 0:
        raise ValueError("a mistake of rank 0 at 10.1.2.3")
    time.sleep(1000)

doctor_transfers.all_gather, doctor_transfers.shift_ring = wrong, hang
doctor_parts.check_links = fail
doctor_parts.main()
"""


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_is_wrong_is_named_and_the_others_are_done(tmp_path, capsys):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY.format(tools=str(ROOT / "tools")))
    status = check_ranks(
        2,
        tmp_path / "report",
        timeout=5.0,
        device="cpu",
        chosen=["links", "rings", "collectives", "abort"],
        command=[sys.executable, str(program)],
    )
    report = json.loads((tmp_path / "report.json").read_text())
    by_part = {(entry["part"], entry["check"]): entry for entry in report["findings"]}
    assert status == 1 and not report["passed"]
    wrong = {key: entry["message"] for key, entry in by_part.items() if entry["passed"] is False}
    assert wrong.keys() == {("links", ""), ("rings", ""), ("collectives", "all_gather int64")}
    assert "ValueError: a mistake of rank 0 at (address)" in wrong["links", ""]
    hung = (
        r"rings took more than --timeout 5 s: rank 1 \(.*\) at rings, forwards, waiting for no rank"
    )
    assert re.search(hung, wrong["rings", ""])
    assert by_part["collectives", "all_gather int64"]["failed_ranks"] == [1]
    assert by_part["abort", "restart"]["passed"]
    text = (tmp_path / "report.txt").read_text()
    assert text.endswith("3 findings are wrong (X), in links, rings, collectives\n")
    assert str(tmp_path) not in text and str(ROOT) not in (tmp_path / "report.json").read_text()


@pytest.mark.slow
def test_ranks_that_torchrun_has_started_report_together(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "tools/doctor.py"), "--ranks", "--parts", "rings,abort"]
    command += ["--device", "cpu", "--report", str(tmp_path / "report")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr
    assert "the ranks work together" in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ranks"] == 2 and report["passed"]
