"""URLs as text: which are folders of checkpoints, and that no secret in one is repeated."""

import contextlib
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from s3_server import SECRET

from megaframe.checkpoint import open_checkpoint, parse_path
from megaframe.errors import UserError
from megaframe.io import remote_requests as retry

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


import pretrain_gpt  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_files")


class TestSecrets:
    @given(
        st.text(max_size=30)
        | st.builds("{}://{}:{}@{}".format, *[st.text(min_size=1, max_size=8)] * 4)
    )
    @example("s3://@[")  # urllib cannot parse its host
    def test_any_text_is_a_place_or_refused_with_a_message(self, text):
        with contextlib.suppress(UserError):
            parsed = parse_path(text)
            assert isinstance(parsed, Path) == (
                "://" not in text or text.startswith(("file", "local"))
            )

    @pytest.mark.parametrize(
        "url",
        [
            f"s3://key:{SECRET}@bucket/x",
            f"https://host/x?token={SECRET}",
            f"abfs://box/x#{SECRET}",
            f"sftp://user:{SECRET}@host:22/x",
            f"https://{SECRET}@host/../x",
            f"https://{SECRET}@host/x",
        ],
    )
    def test_a_url_with_a_secret_is_refused_and_not_repeated(
        self, url, overrides, call_main, monkeypatch, tmp_path
    ):
        with pytest.raises(UserError) as error:
            parse_path(url)
        assert SECRET not in str(error.value)
        monkeypatch.chdir(tmp_path)
        folders = ("folder", "resume", "weights", "memory_dir")
        for key in (*(f"checkpoint__{name}" for name in folders), "run__dir", "metrics__wandb"):
            for options in ([], ["--dry-run"]):
                words = *overrides(**{key: url}), *options
                status, output, errors = call_main(pretrain_gpt.main, *words)
                assert status == 2 and key.replace("__", ".") in errors
                assert SECRET not in output + errors
        assert not [*tmp_path.iterdir()]

    def test_what_a_library_says_is_told_without_secrets(self, s3, monkeypatch):
        system, _ = retry.open_filesystem(s3)

        def leak(*arguments, **options):
            raise OSError(f"cannot sign with {SECRET} (AKIAABCDEFGHIJKLMNOP), Signature=abc%2F1")

        monkeypatch.setattr(system, "info", leak)
        monkeypatch.setattr(retry, "RETRY_SECONDS", 0.1)
        with (
            pytest.warns(UserWarning, match="trying again") as caught_warnings,
            pytest.raises(UserError) as error,
        ):
            open_checkpoint(s3 / "step-00000001")
        for text in (str(error.value), *(str(warning.message) for warning in caught_warnings)):
            assert "cannot sign with ***" in text and "Signature=***" in text
            assert SECRET not in text and "AKIA" not in text and "abc%2F1" not in text
