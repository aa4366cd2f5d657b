"""Copies in the memory of nodes: a run that loses ranks or a node continues from them."""

import shutil
from pathlib import Path

import pytest
import torch
from bitwise import assert_same_losses
from checkpoint_helpers import cut_slice
from entry_runs import make_trainer, read_losses
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE, wait_until
from rank_process import RankProcess, hang_after, list_rank_environments
from tolerances import promised

from megaframe.checkpoint.stores.memory_folder import MemoryFolder
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter, PeerRanks, find_nodes
from megaframe.checkpoint.stores.peer_memory_load import open_peer_memory
from megaframe.config import load
from megaframe.distributed.collectives import barrier
from megaframe.distributed.mesh import Mesh, read_global_rank
from megaframe.errors import UserError
from megaframe.layout import Layout

KEYS = {
    "train__steps": 12,
    "train__global_batch": 4,
    "train__microbatch": 1,
    "model__dropout": 0.1,
    "parallel__zero": 1,
    "parallel__node_size": 2,
    "checkpoint__every": 5,
    "checkpoint__memory_every": 2,
    "checkpoint__resume": "latest",
}


class Stopped(Exception):
    """Ends a run after step 9, leaving its folders as a kill would."""


def train(keys, memory, stop=False, node_size=2):
    """Run training with a folder for each node's memory; return True if `stop` ended it."""
    node = read_global_rank() // node_size
    trainer = make_trainer(load(None, [*keys, f"checkpoint.memory_dir={memory}/{node}"]))
    step = trainer._train_step

    def train_step():
        step()
        if stop and trainer.step == 9:
            trainer.checkpointer._memory_writer.wait()
            raise Stopped

    trainer._train_step = train_step
    try:
        trainer.run()
    except Stopped:
        trainer.checkpointer._writer.wait()
        barrier(trainer.mesh.world)  # none leaves while others still send it the step's weights
        return True
    finally:
        trainer.mesh.close()


def list_files(memory):
    return sorted(str(path.relative_to(memory)) for path in memory.rglob("rank-*"))


@pytest.fixture
def memory(tmp_path):
    for node in "01":
        (tmp_path / "memory" / node).mkdir(parents=True)
    return tmp_path / "memory"


def wait_for_copies(memory, step, processes):
    """Wait until all copies of a step exist.

    Only the folder of that step is read, because those of earlier steps are removed meanwhile.
    """
    files = f"*/*/step-{step:08d}/rank-*.json"
    wait_until(lambda: len(list(memory.glob(files))) >= 8, *processes)


def test_killed_ranks_and_a_lost_node_go_on_from_memory(pool, overrides, memory, tmp_path):
    reference_run = tmp_path / "whole"
    pool.run(4, train, overrides(**KEYS, run__dir=reference_run), memory)
    assert not list(memory.glob("*/*"))  # a finished run removes its copies
    first = start(overrides(**KEYS), memory)
    try:
        wait_for_copies(memory, 8, first)
    finally:
        for process in first:
            process.kill()
    shutil.rmtree(memory / "1")
    (memory / "1").mkdir()
    pool.run(4, train, overrides(**KEYS), memory)
    log = (tmp_path / "run/run.log").read_text()
    assert "copies in memory of step 8 are used; the newest saved checkpoint is of step 5" in log
    losses, whole = read_losses(tmp_path / "run"), read_losses(reference_run)
    assert_same_losses(losses, whole, because="copies in memory have every bit of the state")
    assert not list(memory.glob("*/*"))


def start(keys, memory):
    """Start four ranks, each in its own process, which hang after step 9."""
    nodes = [f"checkpoint.memory_dir={memory}/{rank // 2}" for rank in range(4)]
    return [
        RankProcess(hang_after, 9, words=[*keys, node], environment=environment)
        for node, environment in zip(nodes, list_rank_environments(4), strict=True)
    ]


def lose_a_node(memory):
    shutil.rmtree(memory / "0")
    (memory / "0").mkdir()


def lose_a_part(memory, step="*"):
    for path in memory.rglob(f"step-{step}/rank-00001.*"):
        path.unlink()


def lose_a_new_part(memory):
    lose_a_part(memory, "00000008")


def damage_one_copy(memory):
    (path,) = memory.glob("1/*/step-00000008/rank-00002.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_run_id(memory):
    (memory.parent / "run/run-id").write_text("0123456789abcdef\n")


GONE = "not resumed from copies in memory: "
FROM_MEMORY = "resumed from step 8 of copies in memory"


@pytest.fixture(scope="module")
def get_whole_losses(pool, tmp_path_factory):
    """get_whole_losses(overrides, memory) -> the losses of a run on one rank that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"

    def read(overrides, memory):
        if not folder.exists():
            keys = {**KEYS, "checkpoint__memory_every": 0, "run__dir": folder}
            pool.run(1, train, overrides(**keys), memory)
        return read_losses(folder)

    return read


# Above, ranks are killed and a node is lost.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "ranks", "messages"),
    [
        (lose_a_node, 2, [FROM_MEMORY]),
        (lose_a_part, 4, [f"{GONE}those of step 8 lack the parts of ranks 1 of 4"]),
        (lose_a_new_part, 4, ["in memory: those of step 8", "copies in memory of step 6 are used"]),
        (damage_one_copy, 4, ["rank-00002.safetensors is damaged", FROM_MEMORY]),
        (change_run_id, 4, [f"{GONE}there are none"]),
    ],
)
def test_what_is_lost_and_what_goes_on(
    loss, ranks, messages, pool, overrides, memory, tmp_path, get_whole_losses
):
    """The run continues on four data ranks, or on two tensor ranks."""
    keys = overrides(**KEYS)
    whole_losses = get_whole_losses(overrides, memory)
    assert pool.run(4, train, keys, memory, True) == [True] * 4
    both = [f"{node}/{{}}/step-{step:08d}/rank-0000{rank}.{kind}"
            for node in "01" for step in (6, 8) for rank in range(4)
            for kind in ("json", "safetensors")]  # fmt: skip
    (name,) = {path.name for path in memory.glob("*/*")}
    assert list_files(memory) == sorted(pattern.format(name) for pattern in both)
    loss(memory)
    if ranks == 2:
        keys += ["parallel.tensor=2", "parallel.node_size=1"]
    pool.run(ranks, train, keys, memory, False, ranks // 2)
    log = (tmp_path / "run/run.log").read_text()
    for text in messages:
        assert text in log, log
    assert read_losses(tmp_path / "run") == promised(whole_losses)
    assert not list(memory.glob("*/*"))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.randoms())
def test_a_peer_is_on_the_next_node_and_keeps_at_most_as_many_as_needed(sizes, random):
    ranks = list(range(sum(sizes)))
    random.shuffle(ranks)
    nodes = [[ranks.pop() for _ in range(size)] for size in sizes]
    all_peers = {rank: PeerRanks.find(rank, nodes) for node in nodes for rank in node}
    if len(nodes) == 1:
        assert set(all_peers.values()) == {PeerRanks(None, ())}
        return
    for number, node in enumerate(nodes):
        next_node = nodes[(number + 1) % len(nodes)]
        assert {all_peers[rank].to for rank in node} <= set(next_node)
        for keeper in next_node:
            sources = all_peers[keeper].sources
            assert all(all_peers[source].to == keeper for source in sources)
            assert len(sources) <= -(-len(node) // len(next_node))
        sent = [source for keeper in next_node for source in all_peers[keeper].sources]
        assert sorted(sent) == sorted(node)


def find_nodes_in(memory):
    """Return the nodes of four ranks, of which the first and the last share a folder."""
    mesh = Mesh(Layout(data=4), device="cpu", timeout=PATIENCE)
    memory_folder = MemoryFolder.create(memory / str(mesh.rank % 3 // 2), memory)
    (memory_folder.folder / "mark-of-a-killed-process").touch()
    nodes = find_nodes(memory_folder, mesh.make_control_group())
    mesh.close()
    return nodes


def test_ranks_that_share_a_folder_are_one_node(pool, memory):
    assert pool.run(4, find_nodes_in, memory) == [[[0, 1, 3], [2]]] * 4


def test_nodes_that_are_parts_of_a_host_copy_into_its_memory_once(
    pool, overrides, memory, tmp_path
):
    """`parallel.node_size` may be less than what shares a memory, as where links are faster among
    some GPUs of a host."""
    keys = {**KEYS, "parallel__node_size": 1, "train__steps": 5, "checkpoint__every": 0}
    words = [*overrides(**keys), f"checkpoint.memory_dir={memory}"]
    assert (
        pool.run(2, run_to_step, words, 4)
        == [["rank-00000.safetensors", "rank-00001.safetensors"]] * 2
    )
    assert "could not be made" not in (tmp_path / "run/run.log").read_text()


def run_to_step(words, last):
    """Train; return the files of the copies of a step, once they are complete."""
    trainer = make_trainer(load(None, words))
    files = []
    step = trainer._train_step

    def train_step():
        step()
        if trainer.step == last + 1:
            trainer.checkpointer._memory_writer.wait()
            folder = Path(trainer.config.checkpoint.memory_dir)
            found = folder.glob(f"*/step-{last:08d}/*.safetensors")
            files.extend(sorted(path.name for path in found))

    trainer._train_step = train_step
    trainer.run()
    trainer.mesh.close()
    return files


def lose_memory(words):
    """Train while somebody deletes the folder in memory, once between copies and once in one."""
    trainer = make_trainer(load(None, words))
    writer, step = trainer.checkpointer._memory_writer, trainer._train_step
    exchange = writer._exchange

    def delete_and_exchange(number, own_file, failures):
        if number == 4:
            shutil.rmtree(writer._folder.folder)
        exchange(number, own_file, failures)

    def train_step():
        step()
        if trainer.step == 7:
            trainer.checkpointer.wait_for_saves(trainer.metrics.note)  # the copies of step 6
            writer._folder.close()

    trainer._train_step, writer._exchange = train_step, delete_and_exchange
    trainer.run()
    trainer.mesh.close()


def test_a_memory_that_somebody_cleans_does_not_end_the_run(pool, overrides, memory, tmp_path):
    nodes = [f"checkpoint.memory_dir={memory}/{node}" for node in (0, 1)]
    pool.run(2, lose_own_memory, overrides(**{**KEYS, "checkpoint__every": 0}), nodes)
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("could not be made") == 1 and "copies of step 4 in memory" in log
    assert len(read_losses(tmp_path / "run")) == 12


def lose_own_memory(words, nodes):
    lose_memory([*words, nodes[read_global_rank()]])


def copy_without_room(memory):
    """Save with a second rank that cannot write; return its messages and what is recalled."""
    mesh = Mesh(Layout(data=2), device="cpu", timeout=PATIENCE)
    memory_folder = MemoryFolder.create(memory / str(mesh.rank), memory)
    group, run, full = mesh.make_control_group(), "0" * 16, torch.arange(8.0).view(4, 2)
    writer = PeerMemoryWriter(
        memory_folder, group, PeerRanks.find(mesh.rank, [[0], [1]]), run, None
    )
    slices = [cut_slice("a", full, ((2 * mesh.rank, 0), (2, 2)))]
    messages = []
    writer.save(2, slices, {"step": 2})
    writer.wait()
    if mesh.rank == 1:
        (memory_folder.folder / "step-00000004").touch()  # in the way
    writer.save(4, slices, {"step": 4})
    try:
        writer.wait()
    except UserError as error:
        messages.append(str(error))
    peer_memory = open_peer_memory(memory_folder, run, group, None, messages.append)
    target = torch.zeros(2, 4)
    with peer_memory:
        peer_memory.load([cut_slice("a", torch.zeros(4, 2), ((0, 0), (4, 2)))])
        target = cut_slice("a", torch.zeros(4, 2), ((1, 0), (2, 2)))
        peer_memory.load([target])
    result = messages, peer_memory.step, peer_memory.state, target.tensor.tolist()
    mesh.close()
    return result


def test_a_copy_that_fails_is_told_to_all_and_the_one_before_stays(pool, memory):
    for messages, step, state, rows in pool.run(2, copy_without_room, memory):
        assert "copies of step 4 in memory could not be made: rank 1: cannot write" in messages[0]
        assert "checkpoint.memory_dir" in messages[0]
        assert (step, state, rows) == (2, {"step": 2}, [[2, 3], [4, 5]])


def test_a_folder_that_others_can_read_is_refused(tmp_path):
    memory_folder = MemoryFolder.create(tmp_path, tmp_path / "run")
    assert memory_folder.folder.stat().st_mode & 0o777 == 0o700
    assert (
        MemoryFolder.create(tmp_path, tmp_path / "run")
        == memory_folder
        != MemoryFolder.create(tmp_path, tmp_path / "other")
    )
    memory_folder.folder.chmod(0o755)
    with pytest.raises(UserError, match="with mode 0755"):
        MemoryFolder.create(tmp_path, tmp_path / "run")
    memory_folder.folder.rmdir()
    memory_folder.folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="alone, with mode 0700"):
        MemoryFolder.create(tmp_path, tmp_path / "run")


@given(st.data())
def test_a_record_is_what_was_written_or_none(data):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        memory_folder = MemoryFolder.create(Path(name), Path(name))
        mesh = Mesh(Layout(), device="cpu")
        writer = PeerMemoryWriter(
            memory_folder, mesh.make_control_group(), PeerRanks(None, ()), "0" * 16, None
        )
        writer.save(1, [cut_slice("a", torch.ones(2), ((0,), (2,)))], {"x": [1.5]})
        writer.wait()
        (record,) = memory_folder.read_records("0" * 16)
        path = memory_folder.get_path(1, 0).with_suffix(".json")
        content = bytearray(path.read_bytes())
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        assert record.state == {"x": [1.5]} and not list(memory_folder.read_records("0" * 16))
