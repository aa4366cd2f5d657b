"""Background: what is done with a copy of tensors, while the tensors go on changing.

Only the copy is between a save and training, and it too runs beside it: the tensors of a run stay
as they are until the optimizer's next update, a forward and a backward pass later, so it is that
update which asks whether the copy is done. The work begins with what is copied first. Host memory
for it is used again and again: new pages would cost more than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Event, Thread

import torch
from torch import Tensor

from megaframe.checkpoint.container import Piece, by_alignment, plan
from megaframe.checkpoint.room import ALIGNMENT, aligned
from megaframe.checkpoint.slices import Slice


class Copy:
    """`size` bytes that are being copied, from the first to the last. They are aligned, and stay
    until the work with them is done."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._data: memoryview | None = None
        self._there = 0
        self._failure: Exception | None = None
        self._news = Condition()

    def take(self, piece: Piece) -> memoryview:
        """The bytes of a piece, as soon as they are there. Raises what kept them from coming."""
        with self._news:
            self._news.wait_for(lambda: self._there >= piece.stop or self._failure is not None)
            if self._there < piece.stop and self._failure is not None:
                raise self._failure
            assert self._data is not None
            return self._data[piece.start : piece.stop]

    def held(self) -> memoryview:
        """Where all of it will be. Raises what keeps it from coming."""
        with self._news:
            self._news.wait_for(lambda: self._data is not None or self._failure is not None)
            if self._data is None:
                assert self._failure is not None
                raise self._failure
            return self._data

    def begin(self, data: memoryview) -> None:
        """It is made there."""
        with self._news:
            self._data = data
            self._news.notify_all()

    def reach(self, stop: int) -> None:
        """All before `stop` is there."""
        with self._news:
            self._there = stop
            self._news.notify_all()

    def fail(self, error: Exception) -> None:
        """No more will come."""
        with self._news:
            self._failure = error
            self._news.notify_all()


Work = Callable[[list[Piece], Copy], None]
"""Is given where the pieces of the slices lie in the bytes of the copy, and these."""


class Background:
    """One piece of work at a time, in a thread that ends with the process.

    What goes wrong is raised by the next `wait` or `poll`; after that it can be used again.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._copied = Event()
        self._arrival: torch.cuda.Event | None = None

    def start(self, slices: Sequence[Slice], work: Work) -> None:
        """Copy the slices and do the work, all beside the caller; `copied` says when the slices may
        change. Waits for the work before. Raises ValueError for what cannot be saved."""
        self.wait()
        held = by_alignment(slices)
        planned, parts = plan(held)
        self._copied.clear()
        self._arrival = None
        devices = {part.tensor.device for part in held if part.tensor.is_cuda}
        written = None
        for device in devices:  # one at most: that of the rank
            self._stream = self._stream or torch.cuda.Stream(device)
            written = torch.cuda.current_stream(device).record_event()
        copy = Copy(planned[-1].stop if planned else 0)
        copier = Thread(target=self._fill, args=(parts, written, copy), name="copy", daemon=True)
        run = (planned, copy, copier, work)
        self._thread = Thread(target=self._run, args=run, name="checkpoint", daemon=True)
        copier.start()
        self._thread.start()

    def copied(self) -> None:
        """Return when whatever is done from now on, here or on the device, comes after the copy."""
        if self._thread is None:
            return
        self._copied.wait()
        if self._arrival is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._arrival)

    def wait(self) -> None:
        """Return when the work is done; raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def let_go(self, seconds: float) -> None:
        """Return when the work is done, has failed, or takes longer than that; for the last use."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self) -> bool:
        """Whether no work is in flight; raise what went wrong with the last one."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def _run(self, planned: list[Piece], copy: Copy, copier: Thread, work: Work) -> None:
        try:
            work(planned, copy)
        except Exception as error:  # raised again, by `poll`, in the caller's thread
            self._failure = error
        finally:
            copier.join()  # the next copy is made in the same memory

    def _fill(self, parts: list[Tensor], written: torch.cuda.Event | None, copy: Copy) -> None:
        try:
            if self._stream is not None:  # a thread's device is the first one, and it would use it
                torch.cuda.set_device(self._stream.device)
            self._reserve(copy.size)
            copy.begin(self._buffer.numpy().data[: copy.size])
            if written is None:
                self._copy(parts, copy)
            else:
                self._copy_from_device(parts, written, copy)
        except Exception as error:  # raised again, by `take`, in the thread that works
            copy.fail(error)
        finally:
            parts.clear()
            self._copied.set()

    def _reserve(self, size: int) -> None:
        if self._buffer.numel() >= size:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # never both
        if self._stream is None:
            self._buffer = torch.from_numpy(aligned(size))
            return
        buffer = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        self._buffer = buffer[-buffer.data_ptr() % ALIGNMENT :]

    def _copy(self, tiles: Iterable[Tensor], copy: Copy) -> None:
        start = 0
        for tile in tiles:
            start = self._start_copy(tile, start)
            copy.reach(start)

    def _copy_from_device(
        self, tiles: Iterable[Tensor], written: torch.cuda.Event, copy: Copy
    ) -> None:
        """The same in a stream of its own, beside what the device computes after `written`."""
        assert self._stream is not None
        self._stream.wait_event(written)
        start, marks = 0, []
        with torch.cuda.stream(self._stream):
            for tile in tiles:
                start = self._start_copy(tile, start)
                marks.append((self._stream.record_event(), start))
            self._arrival = self._stream.record_event()
        self._copied.set()
        for arrival, there in marks:
            arrival.synchronize()
            copy.reach(there)

    def _start_copy(self, tensor: Tensor, start: int) -> int:
        """Copy to host memory, behind what ends at `start`; where this ends."""
        stop = start + tensor.nbytes
        _as_bytes_of(tensor, self._buffer[start:stop]).copy_(tensor, non_blocking=True)
        return stop


def _as_bytes_of(tensor: Tensor, data: Tensor) -> Tensor:
    return data.view(tensor.dtype).view(tensor.shape)
