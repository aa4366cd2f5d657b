"""The writer: deleting, replacing, ranks that fail or are missing, and old keys in the store.

Tests `megaframe.checkpoint.coordinator`.
"""

import mmap
import os
import resource
import shutil
import threading
import time

import pytest
import torch
from checkpoint_helpers import load_all, make_slice, save
from patience import PATIENCE
from torch.distributed import HashStore

from megaframe.checkpoint import CheckpointWriter, Slice, find_checkpoint, open_checkpoint
from megaframe.checkpoint.background import BackgroundCopier
from megaframe.checkpoint.folder import list_checkpoints, read_pointer, step_of
from megaframe.errors import UserError


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def make_half(rank, value=1.0):
    return [Slice("a", (4,), (2 * rank,), torch.full((2,), value))]


class TestKeeping:
    def test_the_newest_are_kept_and_nothing_else_is_touched(self, tmp_path):
        (tmp_path / "step-00000001.backup").mkdir()
        (tmp_path / "notes.tmp").mkdir()
        store = HashStore()
        for step in (5, 6, 7, 8):
            save(tmp_path, [[make_slice("a", torch.ones(2))]], step=step, keep=2, store=store)
        assert list_names(tmp_path) == [
            "latest",
            "notes.tmp",
            "step-00000001.backup",
            "step-00000007",
            "step-00000008",
        ]

    def test_every_kth_is_kept_for_good(self, tmp_path):
        store = HashStore()
        for step in range(2, 21, 2):
            tensors_of_ranks = [[make_slice("a", torch.ones(2))]]
            save(tmp_path, tensors_of_ranks, step=step, keep=2, keep_every=6, store=store)
        steps = [int(name[5:]) for name in list_names(tmp_path) if name != "latest"]
        assert steps == [6, 12, 18, 20]
        replaced = tmp_path / "step-00000012"
        shutil.copytree(replaced, tmp_path / "step-00000012.replaced")
        save(tmp_path, tensors_of_ranks, step=22, keep=1, keep_every=6, store=store)
        steps = [int(name[5:]) for name in list_names(tmp_path) if name != "latest"]
        assert steps == [6, 12, 18, 22]

    def test_the_one_just_written_stays_though_others_have_higher_steps(self, tmp_path):
        for step in (9, 8, 3):
            save(tmp_path, [[make_slice("a", torch.ones(2))]], step=step, keep=2)
        assert list_names(tmp_path) == ["latest", "step-00000003", "step-00000009"]
        assert find_checkpoint(tmp_path, "latest") == tmp_path / "step-00000003"

    def test_an_open_checkpoint_is_not_deleted(self, tmp_path):
        old = save(tmp_path, [[make_slice("a", torch.full((2,), 1.0))]], step=1, keep=1)
        with open_checkpoint(old) as checkpoint:
            save(tmp_path, [[make_slice("a", torch.full((2,), 2.0))]], step=2, keep=1)
            target = torch.zeros(2)
            checkpoint.load([make_slice("a", target)])
            assert target.tolist() == [1, 1]
        save(tmp_path, [[make_slice("a", torch.ones(2))]], step=3, keep=1)
        assert list_names(tmp_path) == ["latest", "step-00000003"]

    def test_saving_a_step_again_replaces_it(self, tmp_path):
        for value in (1.0, 2.0):
            path = save(tmp_path, [[make_slice("a", torch.full((2,), value))]], step=4)
        assert load_all(path)["a"].tolist() == [2, 2]
        assert list_names(tmp_path) == ["latest", "step-00000004"]

    def test_a_replaced_one_counts_until_its_successor_is_there(self, tmp_path):
        path = save(tmp_path, [[make_slice("a", torch.ones(2))]], step=4)
        replaced = path.rename(path.with_name(path.name + ".replaced"))
        notes = []
        assert find_checkpoint(tmp_path, "latest", notes.append) == replaced
        assert len(notes) == 1 and "not there" in notes[0]
        save(tmp_path, [[make_slice("a", torch.ones(2))]], step=4, keep=3)
        assert list_names(tmp_path) == ["latest", "step-00000004"]

    def test_leftovers_of_killed_saves_are_removed_at_the_start(self, tmp_path):
        left = tmp_path / "step-00000001.0a1b2c3d.tmp"
        left.mkdir()
        (left / "rank-00000.safetensors").write_bytes(b"x")
        (tmp_path / "latest.0a1b2c3d.tmp").write_text("step-00000001")
        CheckpointWriter(tmp_path, rank=1, world=2, store=HashStore(), keep=1)
        assert len(list_names(tmp_path)) == 2
        CheckpointWriter(tmp_path, rank=0, world=2, store=HashStore(), keep=1)
        assert list_names(tmp_path) == []


class TestAgreement:
    def writers(self, folder, store, timeout=PATIENCE, world=2):
        return [
            CheckpointWriter(folder, rank=rank, world=world, store=store, keep=2, timeout=timeout)
            for rank in range(world)
        ]

    def test_a_rank_that_does_not_come_is_named_and_nothing_is_left(self, tmp_path):
        first, _, third = self.writers(tmp_path, HashStore(), timeout=2.0, world=3)
        first.save(5, make_half(0), {})
        third.save(5, make_half(1), {})
        for writer in (first, third):
            with pytest.raises(UserError, match=r"step 5 .* from ranks 1 of 3"):
                writer.wait()
        assert list_names(tmp_path) == []

    def test_a_lost_leader_is_named(self, tmp_path):
        _, second = self.writers(tmp_path, HashStore(), timeout=0.1)
        second.save(5, make_half(1), {})
        with pytest.raises(UserError, match=r"abandoned by rank 1 .* rank 0 did not finish"):
            second.wait()

    @pytest.mark.parametrize("ended", [None, "", "disk full"])
    @pytest.mark.parametrize("went", [False, True])
    def test_keys_of_a_dead_run_mislead_nobody(self, tmp_path, ended, went):
        store = HashStore()
        store.set("checkpoint/5/attempt", "0a1b2c3d")
        for rank in range(2):
            store.set(f"checkpoint/5/0a1b2c3d/need/{rank}", '{"bytes": 8}')
            store.set(f"checkpoint/5/0a1b2c3d/done/{rank}", "{}")
        if went:
            store.set("checkpoint/5/0a1b2c3d/go", "")
        if ended is not None:
            store.set("checkpoint/5/0a1b2c3d/end", ended)
        first, second = self.writers(tmp_path, store)
        second.save(5, make_half(1), {})
        time.sleep(0.1)
        assert not second.poll()
        first.save(5, make_half(0), {})
        for writer in (first, second):
            writer.wait()
        assert load_all(find_checkpoint(tmp_path, "latest"))["a"].tolist() == [1, 1, 1, 1]

    def test_ranks_that_contradict_each_other_commit_nothing(self, tmp_path):
        for slices, message in [
            ([Slice("a", (4,), (1,), torch.ones(2))], "overlap"),
            ([Slice("a", (5,), (2,), torch.ones(2))], "disagree about a"),
            ([], "hold 2 elements instead of 4"),
        ]:
            first, second = self.writers(tmp_path, HashStore())
            first.save(5, make_half(0), {})
            second.save(5, slices, {})
            with pytest.raises(ValueError, match=message):
                first.wait()
            with pytest.raises(UserError, match=message):
                second.wait()
        assert list_names(tmp_path) == []

    def test_what_cannot_be_saved_is_said_at_once(self, tmp_path):
        writer = CheckpointWriter(tmp_path, rank=0, world=1, store=HashStore(), keep=2)
        with pytest.raises(ValueError, match="int64 cannot be saved"):
            writer.save(1, [make_slice("a", torch.arange(3))], {})
        with pytest.raises(ValueError, match="a is both"):
            writer.save(1, [make_slice("a", torch.ones(3)), make_slice("a", torch.ones(2))], {})
        with pytest.raises(TypeError):
            writer.save(1, [], {"a": torch.ones(3)})
        assert writer.poll()


class TestFailures:
    def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(self, tmp_path):
        good = save(tmp_path, [make_half(0), make_half(1)], step=1)
        store = HashStore()
        first, second = (
            CheckpointWriter(tmp_path, rank=rank, world=2, store=store, keep=1, timeout=PATIENCE)
            for rank in range(2)
        )
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            first.save(2, make_half(0), {})
            second.save(2, [*make_half(1), make_slice("big", torch.ones(1 << 20))], {})
            for writer in (first, second):
                with pytest.raises(UserError) as error:
                    writer.wait()
                text = str(error.value)
                assert "rank 1: cannot write" in text and "rank-00001.safetensors" in text
                assert "File too large (it needs 4,194,312 bytes and" in text
                assert "bytes are free" in text
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list_names(tmp_path) == ["latest", "step-00000001"]
        assert load_all(good)["a"].tolist() == [1, 1, 1, 1]
        for rank, writer in enumerate((first, second)):  # both writers can still save
            writer.save(3, make_half(rank, 3.0), {})
        for writer in (first, second):
            writer.wait()
        assert load_all(find_checkpoint(tmp_path, "latest"))["a"].tolist() == [3, 3, 3, 3]

    def test_a_folder_that_goes_away_is_named_by_the_next_save(self, tmp_path):
        folder = tmp_path / "checkpoints"
        writer = CheckpointWriter(folder, rank=0, world=1, store=HashStore(), keep=1)
        shutil.rmtree(folder)
        folder.write_text("in the way")
        writer.save(1, [make_slice("a", torch.ones(2))], {})
        with pytest.raises(UserError, match=f"step 1: {folder}.*Not a directory"):
            writer.save(2, [make_slice("a", torch.ones(2))], {})

    def test_a_folder_that_cannot_be_made_is_named_at_the_start(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"cannot use .*file/x for checkpoints"):
            CheckpointWriter(tmp_path / "file" / "x", rank=0, world=1, store=HashStore(), keep=1)

    def test_others_can_use_the_store_while_ranks_are_waited_for(self, tmp_path):
        store = HashStore()
        writer = CheckpointWriter(tmp_path, rank=0, world=2, store=store, keep=1, timeout=1)
        writer.save(1, make_half(0), {})
        for _ in range(50):
            assert threading.active_count() > 1
            store.set("other", "x")
            assert store.get("other") == b"x"
        with pytest.raises(UserError, match="ranks 1 of 2"):
            writer.wait()


class TestBackground:
    def test_work_begins_with_what_is_copied_first(self):
        """The work takes the first tensor before the second is copied."""
        tensors = [torch.full((1 << 20,), value) for value in (1.0, 2.0, 3.0)]
        background, copied = BackgroundCopier(), []
        first, start_copy = threading.Event(), background._start_copy

        def copy(tensor, start):
            assert start == 0 or first.wait(PATIENCE)
            return start_copy(tensor, start)

        def work(planned, data):
            for piece in planned:
                copied.append(bytes(data.wait_for_entry(piece)))
                first.set()

        background._start_copy = copy
        background.start([make_slice(f"t{i}", t) for i, t in enumerate(tensors)], work)
        background.wait()
        assert b"".join(copied) == b"".join(t.numpy().tobytes() for t in tensors)

    def test_a_copy_that_fails_is_raised_where_it_is_taken_and_frees_who_waits_for_it(self):
        background = BackgroundCopier()

        def copy(tensor, start):
            raise MemoryError("no room")

        background._start_copy = copy
        background.start(
            [make_slice("a", torch.ones(4))], lambda planned, data: data.wait_for_entry(planned[0])
        )
        background.wait_for_copy()
        with pytest.raises(MemoryError, match="no room"):
            background.wait()


class TestReadingBack:
    """A disk that stores other bytes than were written."""

    @pytest.fixture
    def lying(self, monkeypatch, tmp_path):
        for step in (1, 2):
            save(tmp_path, [[make_slice("a", torch.full((5000,), float(step)))]], step=step)
        pwrite = os.pwrite

        def write(descriptor, data, start):
            if start == 0:  # the header
                return pwrite(descriptor, data, start)
            return pwrite(descriptor, mmap.mmap(-1, len(data)), start)  # zeros, aligned

        monkeypatch.setattr(os, "pwrite", write)

    @pytest.mark.parametrize("step", [1, 3])
    def test_a_damaged_file_is_named_and_all_checkpoints_before_stay(self, step, tmp_path, lying):
        """`latest` names the new checkpoint until it is read back and withdrawn. The save of step 1
        replaces a checkpoint, and is not the newest."""
        ranks = [[make_slice("a", torch.full((5000,), 7.0))], [make_slice("b", torch.ones(3))]]
        with pytest.raises(UserError, match=f"step {step} .*rank 0: .*rank-00000.* is damaged"):
            save(tmp_path, ranks, step=step, keep=1)
        assert read_pointer(tmp_path) == "step-00000002"
        values_by_step = {step_of(path): load_all(path)["a"] for path in list_checkpoints(tmp_path)}
        assert {step: tensor.unique().tolist() for step, tensor in values_by_step.items()} == {
            1: [1],
            2: [2],
        }
        assert not list(tmp_path.glob("*.tmp"))

    def test_the_first_one_leaves_nothing(self, tmp_path, lying):
        with pytest.raises(UserError, match="is damaged"):
            save(tmp_path / "new", [[make_slice("a", torch.ones(5000))]])
        assert list_names(tmp_path / "new") == []

    def test_without_reading_back_the_load_finds_it(self, tmp_path, lying):
        path = save(tmp_path, [[make_slice("a", torch.ones(5000))]], step=3, read_back=False)
        with pytest.raises(UserError, match="tensor a"):
            load_all(path)
