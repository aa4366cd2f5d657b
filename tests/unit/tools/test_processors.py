"""`make test-processors`: which settings run on which processor, and what its report and status
say."""

import os
import sys
from pathlib import Path

import pytest
from programs import load_program
from slow_cases import slow

ROOT = Path(__file__).resolve().parents[3]
processors = load_program("tools/test_processors.py")

ZEN3 = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse4_1 avx avx2 fma\n"
XEON = (
    "vendor_id\t: GenuineIntel\n"
    "flags\t\t: fpu sse4_1 avx2 fma avx512f avx512dq avx512bw avx512vl amx_tile\n"
)


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        (XEON, 0),
        (ZEN3, 3),  # one with AVX-512, and two of MKL, which Intel's processors alone follow
        ("", 5),  # an unknown processor runs what needs no instruction: threads and torch's default
    ],
)
def test_settings_that_a_processor_lacks_are_skipped_by_name(text, skipped):
    flags = processors.read_processor_flags(text)
    reasons = {
        processors.format_setting(s): processors.find_missing_instructions(s, flags)
        for s in processors.SETTINGS
    }
    assert sum(reason is not None for reason in reasons.values()) <= skipped
    if text == XEON:
        assert not any(reasons.values())
    else:
        reason = find_reason(reasons, "avx512")
        assert reason.startswith("ATEN_CPU_CAPABILITY=avx512: this processor has no avx512f")
    if text == ZEN3:
        assert "no GenuineIntel" in reasons["MKL_ENABLE_INSTRUCTIONS=AVX2"]
        assert find_reason(reasons, "avx2") is None
        assert sum(reason is not None for reason in reasons.values()) == skipped


def find_reason(reasons, capability):
    """Return why the setting of one of torch's sets of instructions is skipped, or None."""
    (reason,) = (
        why for name, why in reasons.items() if f"ATEN_CPU_CAPABILITY={capability} " in name
    )
    return reason


def test_every_value_is_run_also_on_processors_that_ignore_some_variables():
    for variable, values in processors.NEEDED.items():
        run = {setting.get(variable) for setting in processors.SETTINGS}
        assert {*values} - run <= {"1"} and None in run, "one thread, and nothing, are the default"
    of_mkl = [setting for setting in processors.SETTINGS if "MKL_ENABLE_INSTRUCTIONS" in setting]
    assert all(len(setting) == 1 for setting in of_mkl)


def test_a_setting_takes_the_place_of_what_was_set_before():
    base = {"PATH": "/bin", "ATEN_CPU_CAPABILITY": "avx512", "TEST_THREADS": "7"}
    environment = processors.make_environment({"ONEDNN_MAX_CPU_ISA": "AVX2"}, base)
    expected = {"PATH": "/bin", "TEST_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert environment == {**expected, "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.slow
def test_torch_follows_what_runs_and_is_asked_whether_it_does():
    setting = {"ATEN_CPU_CAPABILITY": "default"}
    environment = processors.make_environment(setting, os.environ)
    assert processors.find_ignored_setting(setting, environment) is None
    other = processors.make_environment({}, os.environ) | {"ATEN_CPU_CAPABILITY": "no such"}
    if "avx2" in processors.read_processor_flags():
        assert "ATEN_CPU_CAPABILITY=default: what is used is" in processors.find_ignored_setting(
            setting, other
        )


TESTS = {
    "good": ("def test_threads(): import torch; assert torch.get_num_threads() == 3", "passed"),
    "bad": ("def test_wrong(): assert 1 == 2", "failed"),
}


@pytest.mark.parametrize("name", [slow("good"), "bad"])
def test_a_failing_test_fails_the_whole_and_is_named(name, tmp_path):
    code, verdict = TESTS[name]
    if name == "good":
        (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(code + "\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    setting = {"ATEN_CPU_CAPABILITY": "default", "TEST_THREADS": "3"}
    paths = os.pathsep.join((str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        # It starts torch to ask what it follows, which the test above does.
        patch.setattr(processors, "find_ignored_setting", lambda *_: None)
        outcome = processors.run(setting, processors.read_processor_flags(), command)
    assert outcome.verdict == verdict, outcome.note
    assert ("test_wrong" in outcome.note) == (name == "bad")
    assert processors.compute_exit_status([outcome]) == int(name == "bad")
    assert processors.format_setting(setting) in processors.format_report([outcome], "a processor")


def test_where_nothing_could_run_that_is_no_success():
    lacks = processors.run({"ATEN_CPU_CAPABILITY": "avx512"}, frozenset(), ["false"])
    assert lacks.verdict == "skipped" and "avx512f" in lacks.note
    assert processors.compute_exit_status([lacks]) == 1
    assert processors.compute_exit_status([lacks, processors.SettingResult("", "passed", "")]) == 0
    report = processors.format_report([lacks], "x")
    assert "ATEN_CPU_CAPABILITY=avx512: this processor has no" in report


def test_marked_files_are_those_that_are_run():
    files = processors.find_marked_files(ROOT)
    assert (
        "tests/parity/test_kernels.py" in files
        and "tests/unit/tools/test_processors.py" not in files
    )
    assert len(files) > 10
