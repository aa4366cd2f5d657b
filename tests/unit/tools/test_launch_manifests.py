"""Files that launch runs: Kubernetes, SkyPilot and containers."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"


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
    process = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    printed = process.stdout.splitlines()
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
