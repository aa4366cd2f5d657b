"""Runs and queues on a real Ray cluster of two nodes on this machine: a killed rank is replaced, a
run that is asked to leave has saved, nothing is lost, and models are served."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from patience import PATIENCE, count_lines, wait_until
from small_model_folders import write_small_folder
from tolerances import promised

if find_spec("ray") is None:
    pytest.skip("the extra 'ray' is not installed", allow_module_level=True)

from chat_folders import write_byte_tokenizer
from entry_runs import read_losses, train
from held_runs import make_holding_words

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"
sys.path.insert(0, str(LAUNCH))

import ray_serve  # noqa: E402
import ray_train  # noqa: E402

from megaframe.distributed.ray_cluster import connect_to_ray  # noqa: E402
from megaframe.errors import UserError  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """Yield the address of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster  # every worker would wait for it when it lists the tests

    head = {"num_cpus": 1, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    started.add_node(num_cpus=1)
    started.wait_for_nodes()
    yield started.address
    started.shutdown()


@pytest.fixture
def start(tmp_path):
    """start(tool, *words) -> process, whose output goes to tmp_path/output.

    A pipe would block the process while a test waits for something else and does not read it.
    """
    started = []

    def make(tool, *words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, str(ROOT / "tools" / tool), *map(str, words)]
        with open(tmp_path / "output", "w") as log_file:
            started.append(
                subprocess.Popen(command, env=environment, stdout=log_file, stderr=log_file)
            )
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


def wait_for_end(process, tmp_path):
    """Wait for a process; return its exit status and output."""
    return process.wait(300), (tmp_path / "output").read_text()


def find_worker(run, rank):
    """Return the id of Ray's process that started a rank of a run. Raises `LookupError`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        is_rank_of_run = {ray_train.ENTRY.encode(), f"run.dir={run}".encode()} <= {*words}
        if is_rank_of_run and f"RANK={rank}".encode() in variables:
            return parent
    raise LookupError(f"no process of rank {rank}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "2"], "set checkpoint.resume=latest"),
        (["--ranks", "few", "--failures", "0"], "ranks few is neither a number nor two"),
        (["--ranks", "1:2", "--failures", "0"], "--ranks 1:2 needs faults.elastic=true"),
        (["--failures", "0", "--address", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_cannot_run_is_refused(words, expected, monkeypatch, call_main):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    if "--address" in words:
        import ray

        def refuse(**_):
            raise ConnectionError("refused")

        monkeypatch.setattr(ray, "init", refuse)
    status, _, errors = call_main(ray_train.main, *words)
    assert status == 2 and expected in errors


def test_a_run_survives_its_worker_leaves_on_a_signal_and_ends_in_a_queue(
    cluster, start, pool, overrides, tmp_path
):
    """Held at a step, a worker is killed; held there again, the program gets SIGTERM. A queue on
    the cluster continues the run."""
    held, hold = make_holding_words(tmp_path, step=25)
    keys = {"train__steps": 40, "train__microbatch": 2, "checkpoint__every": 10}
    pool.run(1, train, overrides(run__dir=tmp_path / "alone", **keys))
    keys["parallel__tensor"] = 2
    words = [*overrides(**keys), "checkpoint.resume=latest", *held]
    options = ("--address", cluster, "--ranks", "2", "--failures", "2")
    process, output = start("launch/ray_train.py", *options, "--", *words), tmp_path / "output"
    wait = partial(wait_until, describe=output.read_text)
    ledger = tmp_path / "run/faults/ledger.jsonl"
    wait(lambda: count_lines(tmp_path / "run/metrics.jsonl") == 23, process)
    os.kill(find_worker(tmp_path / "run", 1), signal.SIGKILL)
    wait(lambda: ledger.read_text().count('"start"') == 2, process)
    wait(lambda: count_lines(tmp_path / "run/metrics.jsonl") == 23, process)
    process.send_signal(signal.SIGTERM)
    wait((tmp_path / "run/ray-leave").exists, process)
    time.sleep(2 * ray_train.LOOK_SECONDS)
    hold.unlink()
    status, said = wait_for_end(process, tmp_path)
    assert status == 143, said
    assert 24 <= count_lines(tmp_path / "run/metrics.jsonl") < 40
    assert '"restart"' in ledger.read_text() and '"idle"' not in ledger.read_text()
    runs = {"run": {"overrides": words, "ranks": "2"}}
    (tmp_path / "queue.yaml").write_text(json.dumps({"folder": str(tmp_path), "runs": runs}))
    options = (tmp_path / "queue.yaml", "--on", "ray", "--address", cluster)
    status, said = wait_for_end(start("run_queue.py", *options), tmp_path)
    assert status == 0, said
    record = json.loads((tmp_path / "queue.json").read_text())["runs"]["run"]
    assert (record["state"], record["ranks"], record["starts"]) == ("done", 2, 1)
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "alone"))


@pytest.mark.parametrize("status", [0, 2, 138, 143, 1, 3])
def test_only_what_another_try_may_mend_is_tried_again(status, tmp_path, monkeypatch):
    """Ray starts ranks again if a worker raises an error."""
    entry = tmp_path / "entry.py"
    entry.write_text(f"raise SystemExit({status})")
    monkeypatch.setattr(ray_train, "ENTRY", str(entry))
    ended = tmp_path / "ended"
    settings = {"words": [], "folder": tmp_path, "ended": ended, "leave": tmp_path / "leave"}
    if status in (1, 3):
        with pytest.raises(RuntimeError, match=f"rank 0 ended with status {status}"):
            ray_train.run_rank(0, settings, dict(os.environ))
        assert not ended.exists()
    else:
        ray_train.run_rank(0, settings, dict(os.environ))
        assert ended.read_text() == str(status)


def test_more_ranks_than_the_cluster_has_places_are_refused(cluster):
    import ray

    connect_to_ray(cluster)
    try:
        with pytest.raises(UserError, match="3 ranks need 3 CPU and the cluster has 2"):
            ray_train.check_resources((3, 3), {"CPU": 1.0})
    finally:
        ray.shutdown()


def ask(address, path, **request):
    """Return the status and the answer to a request; a GET one without keys."""
    body = json.dumps(request).encode() if request else None
    try:
        with urlopen(Request(f"{address}{path}", body), timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def test_a_model_of_hugging_face_is_served_to_as_many_as_have_room(cluster, start, tmp_path):
    """Everything of one start: health, whole and streamed answers, mistakes, and a full queue."""
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    folder = write_small_folder(tmp_path / "llama", vocab_size=259)
    write_byte_tokenizer(folder, template)
    options = {"ema": False, "tokenizer": None, "extension": [], "device": "cpu"}
    model, output = ray_serve.load_served_model(str(folder), **options), tmp_path / "output"
    address = f"http://127.0.0.1:{ray_train.find_free_port()}"
    words = ("--replicas", "1:2", "--queue", "1", "--tokens", "400", "--address", cluster)
    wait = partial(wait_until, describe=output.read_text)
    process = start("launch/ray_serve.py", folder, "--port", address.rpartition(":")[2], *words)
    wait(lambda: f"serving on {address}" in output.read_text(), process)
    assert ask(address, "/-/healthz")[0] == 200
    assert ask(address, "/health") == (200, b'{"model":"llama"}')
    said = "".join(model.generate("ab", tokens=8, temperature=0)).removeprefix("ab")
    keys = {"prompt": "ab", "max_tokens": 8, "temperature": 0}
    status, answer = ask(address, "/v1/completions", **keys)
    assert status == 200 and json.loads(answer)["choices"][0]["text"] == said
    status, answer = ask(address, "/v1/completions", **keys, stream=True)
    *events, done = answer.decode().split("\n\n")[:-1]
    assert status == 200 and done == "data: [DONE]" and len(events) > 2
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(pieces) == said
    chat = [{"role": "user", "content": "ab"}]
    said = "".join(model.chat(chat, tokens=8, temperature=0))
    status, answer = ask(address, "/v1/chat/completions", **keys | {"prompt": None}, messages=chat)
    assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == said
    status, answer = ask(address, "/v1/completions", prompt="ab", max_tokens=401)
    assert status == 400 and b"max_tokens 401 is above 400" in answer
    assert ask(address, "/v1/models")[0] == 404
    with ThreadPoolExecutor(8) as several:
        long = {"prompt": "ab", "max_tokens": 400, "temperature": 0}
        asked = [several.submit(ask, address, "/v1/completions", **long) for _ in range(8)]
        answers = [one.result() for one in asked]
    assert {status for status, _ in answers} == {200, 503}
    assert all(b"backpressure" in text for status, text in answers if status == 503)
    process.send_signal(signal.SIGTERM)
    status, said = wait_for_end(process, tmp_path)
    assert status == 0, said
