"""The process that makes blocks: it ends with its run, however that ends, and what is left half
made is made again. Modules: megaframe.data.streaming.producer and
megaframe.data.streaming.block_cache.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import is_running, wait_until
from stream_runs import configure, list_rows, open_loader, take_rows, write_corpus

from megaframe.data.streaming.block_cache import BlockCache, Demand, Reader
from megaframe.data.streaming.corpus import Position
from megaframe.errors import UserError

CHILD = """
import json, sys
sys.path.insert(0, {support!r})
from stream_runs import *
config = configure({folder!r}, {corpus!r}, prefetch=1)
with open_loader(config) as loader:
    for step in range(10_000):
        taken = loader.next()
        print(json.dumps([list_rows(taken), taken.state]), flush=True)
"""


def list_children(process):
    """Return the processes below one, by the parents that /proc names."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below, new = set(), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - below
        below |= new
    return below


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "corpus"
    write_corpus(folder)
    return folder


def start_child(tmp_path, corpus):
    support = str(Path(__file__).resolve().parents[3] / "support")
    code = CHILD.format(support=support, folder=str(tmp_path), corpus=str(corpus))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


class TestKill:
    def test_a_killed_run_leaves_no_process_and_resumes(self, corpus, tmp_path):
        expected, _ = take_rows(configure(tmp_path / "whole", corpus), 40)
        child = start_child(tmp_path, corpus)
        lines = [json.loads(child.stdout.readline()) for _ in range(17)]
        below = list_children(child.pid)
        assert below
        child.kill()
        child.wait()
        child.stdout.close()
        wait_until(lambda: not any(map(is_running, below)))
        rows = [(number, tuple(tokens)) for taken, _ in lines for number, tokens in taken]
        (tmp_path / "cache" / "left.unfinished").write_bytes(b"")
        after, _ = take_rows(configure(tmp_path, corpus), 23, state=lines[-1][1])
        assert rows + after == expected
        assert not list((tmp_path / "cache").glob("*/*.unfinished"))

    def test_a_killed_producer_is_named(self, corpus, tmp_path):
        with open_loader(configure(tmp_path, corpus, streaming={"cache_bytes": 200_000})) as loader:
            list_rows(loader.next())
            for process in list_children(os.getpid()):
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                if b"megaframe.data.streaming.producer" in command:
                    os.kill(process, signal.SIGKILL)
            with pytest.raises(UserError, match="process that tokenises ended with status -9"):
                for _ in range(1000):
                    loader.next()

    @pytest.mark.slow
    def test_another_reader_takes_over(self, corpus, tmp_path):
        config = configure(tmp_path, corpus, streaming={"cache_bytes": 200_000})
        expected, _ = take_rows(configure(tmp_path / "whole", corpus), 300)
        with open_loader(config) as other:
            with open_loader(config) as leader:
                leader.next()
                rows = list_rows(other.next())
            rows += [row for _ in range(299) for row in list_rows(other.next())]
        assert rows == expected


class TestCache:
    def test_readers_that_ended_need_nothing(self, tmp_path):
        cache = BlockCache(str(tmp_path / "cache"))
        start = Position(0, 0, 0)
        demand = Demand("d" * 32, 2**63 - 1, start, Position(9, 10**9, 10**9), True)
        one, other = Reader(cache), Reader(cache)
        one.ask(demand)
        assert cache.list_demands() == [demand]
        other.ask(Demand("d" * 32, 0, start, start, False))
        assert len(cache.list_demands()) == 2
        one.close()
        assert [each.seed for each in cache.list_demands()] == [0]
        other._file.close()  # as when its process is killed
        assert cache.list_demands() == []
        assert not list((tmp_path / "cache" / "readers").iterdir())

    def test_one_reader_leads(self, tmp_path):
        cache = BlockCache(str(tmp_path / "cache"))
        cache.fail("the disk is full")
        assert cache.read_failure() == "the disk is full"
        lock = cache.lead()
        assert lock is not None and cache.read_failure() is None
        assert cache.lead() is None
        lock.close()
        again = cache.lead()
        assert again is not None
        again.close()

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"data.streaming.cache: cannot make .*file/cache"):
            BlockCache(str(tmp_path / "file" / "cache"))
