"""The API key and the id of a Weights & Biases run."""

from __future__ import annotations

import pytest

from megaframe.io.wandb_run import InvalidWandbId, has_wandb_key, read_or_make_id


def test_a_key_is_found_where_wandb_finds_it(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_wandb_key()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password made-up\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org/path")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    assert has_wandb_key()


def test_the_id_is_kept_for_a_resume_and_new_for_a_fresh_start(tmp_path):
    path = tmp_path / "wandb.id"
    first = read_or_make_id(path, fresh=True)
    assert read_or_make_id(path, fresh=False) == first
    assert read_or_make_id(path, fresh=True) != first
    path.write_text("../../x\n")
    with pytest.raises(InvalidWandbId, match="holds no id"):
        read_or_make_id(path, fresh=False)
