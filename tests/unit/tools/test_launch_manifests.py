"""Files that launch runs: Kubernetes, SkyPilot and containers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from megaframe.io.local_rendezvous import find_free_port
from megaframe.run_queue.run_process import parse_run
from megaframe.validate.run import validate_config

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


def read_variables(documents):
    """Return the environment that all containers have."""
    return {
        variable["name"]: variable["value"] for env in find(documents, "env") for variable in env
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_start_a_run_that_is_there_on_as_many_nodes_everywhere(path):
    documents = read_documents(path)
    words = [*find(documents, "command")][-1] + next(find(documents, "args"), [])
    assert words[:2] == ["python", "tools/launch/node.py"]
    assert (ROOT / words[words.index("--config") + 1]).exists()
    assert "checkpoint.resume=latest" in words
    keys = ("parallelism", "completions", "numNodes", "minReplicas", "maxReplicas")
    assert {count for key in keys for count in find(documents, key)} == {2}
    variables = read_variables(documents)
    nodes = sum(find(documents, "parallelism"))
    assert not variables or int(variables["PET_NNODES"]) == nodes
    mounts = {mount["name"] for several in find(documents, "volumeMounts") for mount in several}
    assert mounts == {
        volume["name"] for several in find(documents, "volumes") for volume in several
    }


def check_islands(words, addresses, ranks):
    """Assert that a run is right for these nodes, of which those of a region are together in the
    order in which torchrun numbers them, and that an island is a region.

    Args:
        words: Of `node.py`.
        addresses: Of the nodes of each region.
        ranks: Of a node.
    """
    config, _ = parse_run(words)
    nodes = [address for region in addresses for address in region]
    validate_config(config, len(nodes) * ranks, data=False)
    ordered = [node.addr for node in sorted(_NodeDesc(address, 7, 0) for address in nodes)]
    assert ordered == nodes
    assert {len(region) for region in addresses} == {len(nodes) // config.parallel.islands}
    # The slowest part of the data axis: consecutive ranks, with all other axes inside.
    assert config.parallel.islands == len(addresses)


def test_islands_on_kubernetes_are_the_regions_of_their_nodes():
    (document,) = read_documents(LAUNCH / "kubernetes/islands.yaml")
    jobs = document["spec"]["replicatedJobs"]
    regions = [next(find(job, "nodeSelector"))["topology.kubernetes.io/region"] for job in jobs]
    assert len({*regions}) == len(jobs) == 2
    name = document["metadata"]["name"]
    addresses = [
        [
            f"{name}-{job['name']}-0-{index}.{name}"
            for index in range(next(find(job, "parallelism")))
        ]
        for job in jobs
    ]
    variables = read_variables(document)
    assert variables["PET_RDZV_ENDPOINT"].partition(":")[0] == addresses[0][0]
    for command in find(document, "command"):
        check_islands(command[2:], addresses, int(variables["PET_NPROC_PER_NODE"]))


def run_skypilot(task, folder, **variables):
    """Return the PET_ variables and the words with which a node of a task starts `node.py`."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/sh\nenv | grep ^PET_\necho "$@"\n')
    python.chmod(0o755)
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        **{name: str(value) for name, value in task["envs"].items()},
        **variables,
    }
    process = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=folder,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    *lines, words = process.stdout.splitlines()
    return dict(line.split("=", 1) for line in lines), words.split()


def test_islands_on_skypilot_are_the_regions_of_their_clusters(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot-islands.yaml").read_text())
    addresses = [["10.1.0.4", "10.1.0.7"], ["10.2.3.1", "10.2.3.9"]]
    started = {}
    for region, first in zip(addresses, ("", addresses[0][0]), strict=True):
        for rank, address in enumerate(region):
            ips = "\n".join(region)
            started[address] = run_skypilot(task, tmp_path, FIRST=first,
                SKYPILOT_NODE_IPS=ips, SKYPILOT_NODE_RANK=str(rank))  # fmt: skip
    for address, (variables, words) in started.items():
        assert variables["PET_LOCAL_ADDR"] == address and variables["PET_NNODES"] == "4"
        assert variables["PET_RDZV_ENDPOINT"] == "10.1.0.4:29400"
        is_host = f"is_host={int(address == '10.1.0.4')}"
        assert variables["PET_RDZV_CONF"] == is_host
        assert words[0] == "tools/launch/node.py"
        check_islands(words[1:], addresses, int(variables["PET_NPROC_PER_NODE"]))
    assert subprocess.run(["bash", "-n", "-c", task["setup"]]).returncode == 0


NODE = """
import os
print(os.environ["PET_LOCAL_ADDR"], os.environ["RANK"], flush=True)
"""


@pytest.mark.slow
def test_torchrun_numbers_nodes_by_their_addresses(tmp_path):
    """The one that comes first has the later address, as a second region may."""
    program = tmp_path / "node.py"
    program.write_text(NODE)
    port = find_free_port()
    processes = []
    for address in ("127.0.0.2", "127.0.0.1"):
        variables = {
            **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d"},
            **{"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_LOCAL_ADDR": address},
            "PET_RDZV_CONF": f"is_host={int(address == '127.0.0.1')}",
        }
        command = [sys.executable, "-m", "torch.distributed.run", str(program)]
        environment = {**os.environ, **variables}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    printed = [process.communicate(timeout=PATIENCE)[0].split() for process in processes]
    assert printed == [["127.0.0.2", "1"], ["127.0.0.1", "0"]]


def test_skypilot_tells_torchrun_where_the_first_node_is(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= {
        "name", "workdir", "num_nodes", "resources", "file_mounts", "envs", "setup", "run",
    }  # fmt: skip
    variables, words = run_skypilot(
        task, tmp_path, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1"
    )
    assert (variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"]) == ("2", "8")
    assert variables["PET_RDZV_CONF"] == "is_host=0"
    assert variables["PET_RDZV_ENDPOINT"] == "10.0.0.1:29400"
    assert words[:3] == ["tools/launch/node.py", "--config", task["envs"]["CONFIG"]]
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
