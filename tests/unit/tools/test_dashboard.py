"""tools/dashboard.py: what it sends elsewhere."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from run_folders import make_lines, write
from wandb_files import read_wandb_rows, without_wandb_key

from megaframe.config import dump, load

ROOT = Path(__file__).parents[3]
SMALL = ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab=512", "train.seq=128"]


def run_tool(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tools/dashboard.py", *map(str, words)])
    runpy.run_path(str(ROOT / "tools/dashboard.py"), run_name="__main__")


@pytest.mark.slow
def test_the_page_with_its_prediction_is_added_to_the_run_of_wandb(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    pytest.importorskip("plotly")
    without_wandb_key(monkeypatch, tmp_path)
    folder = write(tmp_path / "run", make_lines(30), environment={"ranks": 1, "device": "CPU"})
    (folder / "config.yaml").write_text(dump(load(None, [*SMALL, "metrics.wandb=project"])))
    (folder / "wandb.id").write_text("a1b2c3d4\n")
    run_tool(monkeypatch, folder, "--upload")
    assert "added the page" in capsys.readouterr().out
    (file,) = (folder / "wandb").glob("offline-run-*/run-a1b2c3d4.wandb")
    pages = [row["dashboard/path"] for row in read_wandb_rows(file) if "dashboard/path" in row]
    assert len(pages) == 1
    page = next(file.parent.glob(f"files/{pages[0]}")).read_text()
    assert "Plotly" in page and "Where the peak went" in page
    assert "predicted for cpu" in page


def test_a_folder_of_runs_is_a_page_of_all_of_them_and_no_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    for rate in ("1e-3", "3e-3"):
        write(tmp_path / "sweep" / f"lr={rate}", make_lines(5), {"optim": {"lr": rate}})
    run_tool(monkeypatch, tmp_path / "sweep")
    page = (tmp_path / "sweep/dashboard.html").read_text()
    assert f"wrote {tmp_path / 'sweep/dashboard.html'}" in capsys.readouterr().out
    assert all(f'"name":"lr={rate}"' in page for rate in ("1e-3", "3e-3"))
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, tmp_path)
    assert ended.value.code == 2
    assert "it is not a run folder" in capsys.readouterr().err


def test_a_run_in_no_project_has_nowhere_to_send_its_page(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "run", make_lines(3))
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, folder, "--upload")
    assert ended.value.code == 2
    assert "metrics.wandb" in capsys.readouterr().err
