"""Launching on clusters: what a node does, the Slurm script with fake Slurm commands, and the files
for Kubernetes, SkyPilot and containers."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from rank_pool import free_port

from megaframe.config import load
from megaframe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"
_spec = importlib.util.spec_from_file_location("node", LAUNCH / "node.py")
node = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(node)

# A node.


def test_a_node_is_told_by_the_variables_of_torchrun_and_the_rest_is_usual():
    variables = {"PET_NNODES": "2:4", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29400"}
    settings = {**variables, **node.make_launcher_defaults(variables)}
    assert settings["PET_NNODES"] == "2:4" and settings["PET_RDZV_ENDPOINT"] == "first:29400"
    assert "SIGUSR1" in settings["PET_SIGNALS_TO_HANDLE"] and settings["PET_RDZV_BACKEND"] == "c10d"
    assert node.make_launcher_defaults({**settings, "PET_RDZV_ENDPOINT": "other:1"}) == {}


@pytest.mark.parametrize(
    ("nodes", "ranks", "world"), [("1", "3", 3), ("2", "2", 4), ("2:4", "8", 32)]
)
def test_the_config_is_checked_for_as_many_ranks_as_may_come(nodes, ranks, world):
    assert node.compute_largest_world(nodes, ranks) == world


@pytest.mark.parametrize(("nodes", "ranks"), [("many", "1"), ("1:2:3", "1"), ("1", "all")])
def test_numbers_of_nodes_and_ranks_that_are_none_are_refused(nodes, ranks):
    with pytest.raises(UserError, match="PET_N"):
        node.compute_largest_world(nodes, ranks)


LATEST, NOWHERE = "checkpoint.resume=latest", "data.sources=[{path: /nowhere}]"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.layers=0"], "model.layers=0"),
        ([], "set checkpoint.resume=latest"),
        ([LATEST, "model.vocab=61"], "data.sources is empty"),
        ([LATEST, "model.vocab=61", NOWHERE], "data.sources: cannot open /nowhere.idx"),
        ([LATEST, "data.tokenizer=hf:/nowhere.json"], "cannot read tokenizer file /nowhere.json"),
    ],
)
def test_a_mistake_ends_a_node_before_its_ranks_are_started(keys, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["node.py", *keys])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(node, "launch", None)
    with pytest.raises(SystemExit) as ended:
        node.main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_node_checks_the_split_that_is_evaluated(overrides):
    config = load(None, overrides(train__eval_every=1))
    node.check_data(config)
    few = load(None, overrides(train__eval_every=1, data__split="[0.999, 0.001, 0]"))
    with pytest.raises(UserError, match=r"leaves the validation split of .* without a document"):
        node.check_data(few)


@pytest.mark.parametrize(("status", "starts"), [(2, 1), pytest.param(5, 3, marks=pytest.mark.slow)])
def test_ranks_are_started_again_unless_the_user_has_made_a_mistake(status, starts, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        f"import os, sys, time\nopen({str(tmp_path / 'starts')!r}, 'a').write(os.environ['RANK'])\n"
        f"if os.environ['RANK'] == '1':\n    sys.exit({status})\ntime.sleep(60)\n"
    )
    done = launch_program(program, PET_MAX_RESTARTS="2", PET_MONITOR_INTERVAL="0.05")
    assert done.returncode == status, done.stderr
    assert f"rank 1 failed first, with status {status}" in done.stderr
    assert (tmp_path / "starts").read_text().count("1") == starts


@pytest.mark.slow
def test_a_mistake_of_one_node_ends_the_others_too(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write(os.environ['RANK'])\n"
        "time.sleep(1 if os.environ['RANK'] == '1' else 4)\n"
        "sys.exit(2 if os.environ['RANK'] == '1' else 3)\n"
    )
    endpoint = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"localhost:{free_port()}"}
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "3", **endpoint}
    with ThreadPoolExecutor() as nodes:
        ended = list(nodes.map(lambda _: launch_program(program, **both), range(2)))
    assert sorted(node.returncode for node in ended) == [1, 2]
    (other,) = (node for node in ended if node.returncode == 1)
    assert "another node has ended the run" in other.stderr
    assert "Traceback" not in other.stderr
    assert sorted((tmp_path / "starts").read_text()) == ["0", "1"]


def launch_program(program, **variables):
    """Run two ranks of a program as a node does; return the finished process."""
    call = f"import sys; sys.path.insert(0, {str(LAUNCH)!r}); import node; "
    call += f"sys.exit(node.launch([{str(program)!r}]))"
    environment = {**os.environ, "PET_NPROC_PER_NODE": "2", **variables}
    return subprocess.run(
        [sys.executable, "-c", call], env=environment, capture_output=True, text=True
    )


def test_a_node_ends_with_the_status_of_the_rank_that_failed_first(tmp_path):
    """A rank that a signal ended gives 128 plus the signal's number, as in a shell."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(60)\n"
    )
    done = launch_program(program, PET_MAX_RESTARTS="0")
    assert done.returncode == 3, done.stderr
    assert "rank 1 failed first, with status 3" in done.stderr
    assert node.report_failure(0, -signal.SIGKILL) == 137


@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_saves_and_tells_so(overrides, tmp_path):
    keys = overrides(train__steps=10**6, checkpoint__every=10**6, checkpoint__resume="latest")
    command = [sys.executable, str(LAUNCH / "node.py"), "--no-doctor", *keys]
    with open(tmp_path / "output", "w") as log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file, cwd=ROOT)
    try:
        metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= 2:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 138, (tmp_path / "output").read_text()
    finally:
        process.kill()
    assert (tmp_path / "run/checkpoints/latest").exists()


# Slurm.

SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
while [[ "$1" == --* ]]; do
    case $1 in --nodelist=*) NODES_OF_STEP=${1#--nodelist=};; esac
    shift
done
[ -n "${NODES_OF_STEP:-}" ] && exec "$@"
worst=0
for name in a1 a2 a3; do
    SLURMD_NODENAME=$name "$@"
    status=$?
    [ $status -gt $worst ] && worst=$status
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$CALLS"
case "$1 $2" in
    "show hostnames") printf 'a1\\na2\\na3\\n';;
    "show node") echo "NodeName=$3 NodeAddr=10.0.0.${3#a} NodeHostName=$3";;
esac
"""
PYTHON = """#!/usr/bin/env bash
if [ "$2" = --look ]; then
    [ "$SICK" = mistake ] && exit 2
    [ "$SLEEP" = look ] && { touch "$CALLS.up"; sleep 1; }
    case " $SICK " in *" $SLURMD_NODENAME "*) echo "X broken" ; exit 4;; esac
    exit 0
fi
echo "python $*" >> "$CALLS"
env | grep ^PET_ | sort >> "$CALLS"
if [ "$SLEEP" = run ]; then
    trap 'echo heard >> "$CALLS"; exit 138' USR1
    touch "$CALLS.up"
    for i in $(seq 200); do sleep 0.05; done
fi
exit "$STATUS"
"""


@pytest.fixture
def slurm(tmp_path):
    """slurm(sick="", status=0, sleep="", **environment) -> process of the script.

    Like Slurm, it runs a copy of the script in another folder. The fake commands write their calls
    to tmp_path/calls. sick: nodes that are not fit. status: the run's exit status. sleep: "look" or
    "run", the part that takes long; tmp_path/calls.up exists once it has begun.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sh").read_text())

    def run(sick="", status=0, sleep="", **environment):
        given = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": str(folder / "python"),
            "CALLS": str(tmp_path / "calls"),
            "SICK": sick,
            "STATUS": str(status),
            "SLEEP": sleep,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-3]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            **environment,
        }
        return subprocess.Popen(
            ["bash", str(copy), "--config", "RUN.yaml", "data.split=[0.9, 0.1, 0]"],
            cwd=tmp_path,
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def read_calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


def test_a_job_runs_on_all_nodes_that_are_fit(slurm, tmp_path):
    process = slurm(sick="a1", NODES="2", RANKS="8", SLURM_RESTART_COUNT="3")
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    assert "nodes that are not fit: a1" in errors and "X broken" in errors
    srun_calls = read_calls(tmp_path)
    assert any("--nodelist=a2,a3" in line and "--ntasks=2" in line for line in srun_calls)
    assert "PET_NNODES=2" in srun_calls and "PET_NPROC_PER_NODE=8" in srun_calls
    assert "PET_RDZV_ENDPOINT=10.0.0.2:29400" in srun_calls and "PET_RDZV_ID=7-3" in srun_calls
    run = next(line for line in srun_calls if line.startswith("python"))
    assert run.endswith("node.py --no-doctor --config RUN.yaml data.split=[0.9, 0.1, 0]")
    assert not any("requeue" in line for line in srun_calls)


def test_a_job_with_too_few_fit_nodes_says_what_to_do(slurm, tmp_path):
    process = slurm(sick="a1 a3")
    errors = process.communicate()[1]
    assert process.returncode == 4
    assert "1 nodes are fit and 3 are needed" in errors and "--exclude=a1,a3" in errors
    assert not any(line.startswith("python") for line in read_calls(tmp_path))


def test_a_job_whose_config_has_a_mistake_ends_as_that(slurm, tmp_path):
    process = slurm(sick="mistake")
    assert "are fit" not in process.communicate()[1]
    assert process.returncode == 2
    assert len(read_calls(tmp_path)) == 1


@pytest.mark.parametrize(
    ("status", "count", "requeued"), [(3, 0, True), (1, 2, True), (3, 5, False), (2, 0, False)]
)
def test_a_job_that_failed_is_queued_again_where_that_may_help(
    status, count, requeued, slurm, tmp_path
):
    process = slurm(status=status, SLURM_RESTART_COUNT=str(count), RESTARTS="5")
    process.communicate()
    assert process.returncode == (0 if requeued else status)
    assert ("scontrol requeue 7" in read_calls(tmp_path)) == requeued


@pytest.mark.parametrize(
    ("seconds", "count", "requeued"), [(300, 99, True), (0, 19, True), (0, 20, False)]
)
def test_a_job_near_its_time_limit_asks_the_run_to_leave_and_is_queued_again(
    seconds, count, requeued, slurm, tmp_path
):
    """A job is not queued again forever if every start leaves only a moment to train."""
    process = slurm(sleep="run", SLURM_RESTART_COUNT=str(count), SECONDS=str(seconds))
    output = ask_to_leave(process, tmp_path)
    assert process.returncode == (0 if requeued else 138), output
    heard = read_calls(tmp_path)
    assert heard[heard.index("heard") + 1 :] == ["scontrol requeue 7"] * requeued
    assert ("status 138" in output) == requeued
    assert ("a longer --time" in output) == (seconds < 300)


def ask_to_leave(process, tmp_path):
    """Send SIGUSR1 to a job as soon as its long part has begun; return what it says."""
    deadline = time.monotonic() + 20
    while not (tmp_path / "calls.up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    return process.communicate()[1]


def test_a_job_that_is_asked_to_leave_while_it_looks_at_nodes_begins_no_run(slurm, tmp_path):
    process = slurm(sleep="look", SECONDS="300")
    output = ask_to_leave(process, tmp_path)
    assert process.returncode == 0, output
    assert "status 138" in output
    assert read_calls(tmp_path)[-1] == "scontrol requeue 7"
    assert not any(line.startswith("python") for line in read_calls(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SLURM_JOB_ID", "", "start it with sbatch"),
        ("SLURM_SUBMIT_DIR", "/tmp", "call sbatch in the project"),
        ("PYTHON", "nowhere/python", "set PYTHON"),
    ],
)
def test_a_job_that_cannot_begin_says_why(variable, value, expected, slurm):
    process = slurm(**{variable: value})
    assert expected in process.communicate()[1]
    assert process.returncode == 2


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "RUN.yaml", "--help"]])
def test_the_script_tells_how_to_use_it_where_there_is_no_slurm(words, tmp_path):
    script = [shutil.which("bash"), LAUNCH / "slurm.sh", *words]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A run on Slurm:\n\n  sbatch --nodes 4 tools/launch/slurm.sh")
    assert done.stdout.rstrip().endswith("PORT (29400).") and "#" not in done.stdout


# Files for other engines.

MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def read_documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def find(document, key):
    """Yield all values of a key, at any depth."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from find(value, key)


def list_lost(document, original, where=""):
    """Return the places of a document that differ in `kept`; defaults that `kept` adds are fine."""
    if isinstance(document, dict) and isinstance(original, dict):
        pairs = [(key, value, original.get(key)) for key, value in document.items()]
    elif (
        isinstance(document, list) and isinstance(original, list) and len(original) == len(document)
    ):
        pairs = [(key, *both) for key, both in enumerate(zip(document, original, strict=True))]
    else:
        return [] if document == original else [where]
    return [
        place for key, first, other in pairs for place in list_lost(first, other, f"{where}/{key}")
    ]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_what_their_schemas_say(path):
    """Kubeflow's own models refuse wrong types and drop unknown keys, so a document is valid if a
    round trip loses nothing. They have no PyTorchJob, so only its keys and its pod are checked.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in read_documents(path):
        name = MODELS.get(document["kind"])
        if name is None:
            assert set(document["spec"]) <= {
                "elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy",
            }  # fmt: skip
            name, (document,) = "IoK8sApiCoreV1PodTemplateSpec", find(document, "template")
        model = getattr(models, name)
        assert list_lost(document, model.from_dict(document).to_dict()) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_start_a_run_that_is_there_on_as_many_nodes_everywhere(path):
    documents = read_documents(path)
    words = [*find(documents, "command")][-1] + next(find(documents, "args"), [])
    assert words[:2] == ["python", "tools/launch/node.py"]
    assert (ROOT / words[words.index("--config") + 1]).exists()
    assert "checkpoint.resume=latest" in words
    keys = ("parallelism", "completions", "numNodes", "minReplicas", "maxReplicas")
    counts = [count for key in keys for count in find(documents, key)]
    variables = {
        variable["name"]: variable["value"] for env in find(documents, "env") for variable in env
    }
    counts += [int(variables["PET_NNODES"])] if variables else []
    assert set(counts) == {2}
    mounts = {mount["name"] for several in find(documents, "volumeMounts") for mount in several}
    assert mounts == {
        volume["name"] for several in find(documents, "volumes") for volume in several
    }


def test_skypilot_tells_torchrun_where_the_first_node_is(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= {
        "name", "workdir", "num_nodes", "resources", "file_mounts", "envs", "setup", "run",
    }  # fmt: skip
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nenv | grep ^PET_\necho "$@"\n')
    python.chmod(0o755)
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "1",
    }
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **task["envs"]}
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    printed = done.stdout.splitlines()
    assert {"PET_NNODES=2", "PET_NPROC_PER_NODE=8", "PET_RDZV_CONF=is_host=0"} <= set(printed)
    assert "PET_RDZV_ENDPOINT=10.0.0.1:29400" in printed
    assert printed[-1].split()[:3] == ["tools/launch/node.py", "--config", task["envs"]["CONFIG"]]
    assert (ROOT / task["envs"]["CONFIG"]).exists()
    assert subprocess.run(["bash", "-n", "-c", task["setup"]]).returncode == 0


def test_the_container_has_what_setup_and_the_commands_need():
    text = (LAUNCH / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = [line.split(maxsplit=1)[0] for line in lines]
    assert set(words) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "CMD"}
    copied = [name for line in lines if line.startswith("COPY") for name in shlex.split(line)[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"setup.py", "README.md", "megaframe", "kernels", "tools", "pretrain_gpt.py"} <= {
        *copied
    }
    assert lines[words.index("CMD") :] == [lines[-1]] and words[-2] == "USER"


def test_everything_that_starts_a_run_names_programs_that_are_there():
    for path in (*LAUNCH.rglob("*.yaml"), LAUNCH / "slurm.sh", LAUNCH / "Containerfile"):
        for name in re.findall(r"\btools/[a-z_/]+\.(?:py|sh|yaml)\b", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
