"""What a run with parts of an extension has left: tools and runs read it if their own command line
names the extension, say which one it is if not, and need none where they need only bytes."""

from types import SimpleNamespace

import pytest
from entry_runs import train
from repo_copy import ROOT
from slow_cases import slow
from tool_process import run_tool

from megaframe.config.registry import Registry, use_registry

EXTENSION = str(ROOT / "examples/norm.py")
PARTS = (
    "model.norm={kind: dynamic_tanh, slope: 0.7}",
    "model.blocks=[{feed_forward: {kind: low_rank, rank: 6}}]",
)
MESSAGE = (
    "is of a run with 1 extension, which is not loaded here: "
    f"{EXTENSION}; if you trust it, give run.extensions=[{EXTENSION}] to a run, or to a tool "
    f"--extension {EXTENSION}"
)


@pytest.fixture(scope="module")
def trained(pool, corpus, tmp_path_factory):
    """Return the folder and the last checkpoint of a run with parts, its text and its words."""
    folder = tmp_path_factory.mktemp("trained")
    words = [
        *("run.device=cpu", "model.layers=2", "model.hidden=16", "model.heads=2"),
        *("model.vocab=257", "train.seq=16", "train.steps=2", "train.global_batch=4"),
        *("train.precision=fp64", "data.tokenizer=bytes", f"data.sources=[{{path: {corpus}}}]"),
        *("data.split=[0.8, 0.2, 0.0]", "kernels.matmul=torch", "checkpoint.every=2", *PARTS),
    ]
    pool.run(1, train, [*words, f"run.dir={folder / 'run'}", f"run.extensions=[{EXTENSION}]"])
    text = folder / "text.txt"
    text.write_text("def main():\n    return 0\n" * 4)
    checkpoint = folder / "run/checkpoints/step-00000002"
    return SimpleNamespace(run=folder / "run", checkpoint=checkpoint, text=text, words=words)


def call(tool, *words):
    done = run_tool(f"tools/{tool}.py", *words)
    return done.returncode, done.stdout + done.stderr


def list_calls(path, text, folder):
    """Return the command lines of all tools that read the state in a checkpoint."""
    return {
        "generate": ("generate", "--checkpoint", path, "--prompt", "a", "--tokens", 2),
        "evaluate": ("evaluate", "--checkpoint", path, "--text", text),
        "export-hf": ("checkpoint", "export-hf", path, "--to", folder / "exported"),
    }


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("generate", "run"), ("evaluate", "checkpoint"), ("export-hf", "run")),
        *(slow("generate", "checkpoint"), slow("evaluate", "run"), slow("export-hf", "checkpoint")),
    ],
)
def test_a_tool_names_the_extension_that_it_lacks(name, place, trained, tmp_path):
    words = list_calls(getattr(trained, place), trained.text, tmp_path)[name]
    status, text = call(*words)
    assert (status, text) == (2, f"error: {trained.checkpoint} {MESSAGE}\n")


def test_a_tool_that_is_given_the_extension_goes_on(trained, tmp_path):
    calls = list_calls(trained.run, trained.text, tmp_path)
    outcomes = {name: call(*words, "--extension", EXTENSION) for name, words in calls.items()}
    assert outcomes["generate"][0] == 0, outcomes
    status, text = outcomes["evaluate"]
    assert status == 0 and "perplexity" in text, text
    status, text = outcomes["export-hf"]
    assert status == 2 and "no Hugging Face model has" in text, text
    assert (
        "low_rank or dynamic_tanh, which come from ext" in text
        and not (tmp_path / "exported").exists()
    )


def test_bytes_are_read_without_the_extension(trained, tmp_path):
    run, last = trained.run, trained.checkpoint
    for words, expected in (
        (("inspect", run), "dynamic_tanh"),
        (("verify", run), f"{last}: step 2"),
        (("reshard", run, "--to", tmp_path / "again", "--files", 2), "wrote"),
        (("diff", run, tmp_path / "again"), "0 tensors differ"),
    ):
        status, text = call("checkpoint", *words)
        assert status == 0 and expected in text, text


@pytest.mark.slow
@pytest.mark.parametrize("given", ["nothing", "config"])
def test_a_folder_of_torch_comes_back_with_the_name_of_the_extension(given, trained, tmp_path):
    options = ("--config", trained.run / "config.yaml") if given == "config" else ()
    for words in (
        ("export-dcp", trained.run, "--to", tmp_path / "dcp"),
        ("import-dcp", tmp_path / "dcp", "--to", tmp_path / "back", *options),
        ("diff", tmp_path / "back", trained.checkpoint),
    ):
        status, text = call("checkpoint", *words)
        assert status == 0, text
    words = ("--checkpoint", tmp_path / "back", "--prompt", "a", "--tokens", 1)
    status, text = call("generate", *words)
    assert status == 2 and MESSAGE in text
    assert call("generate", *words, "--extension", EXTENSION)[0] == 0


@pytest.mark.parametrize("key", ["resume", "weights"])
def test_a_run_names_the_extension_of_a_run_folder(key, trained, tmp_path, capsys):
    plain = [word for word in trained.words if word not in PARTS]
    with use_registry(Registry()), pytest.raises(SystemExit) as status:
        train([*plain, f"run.dir={tmp_path}", f"checkpoint.{key}={trained.run}"])
    assert status.value.code == 2
    assert f"{trained.checkpoint} {MESSAGE}" in capsys.readouterr().err


def test_a_report_has_a_prediction_if_it_is_given_the_extension(trained, tmp_path):
    words = ("report", trained.run, "--cluster", "cpu", "--output", tmp_path)
    status, text = call(*words)
    assert status == 0 and f"no prediction: {trained.run / 'config.yaml'} is of a run" in text
    assert f"--extension {EXTENSION}" in text
    status, text = call(*words, "--extension", EXTENSION)
    assert status == 0 and "no prediction" not in text, text
    words = ("dashboard", trained.run, "--cluster", "cpu", "--output", tmp_path / "page.html")
    assert f"no prediction: {trained.run / 'config.yaml'} {MESSAGE}" in call(*words)[1]
    status, text = call(*words, "--extension", EXTENSION)
    assert status == 0 and "no prediction" not in text, text
