"""Works in the background on a copy of tensors, while training changes the tensors.

Training waits only for the copy, and that overlaps with training too: the tensors do not change
until the optimizer's next update, a forward and a backward pass later, so only this update waits
for the copy to be done. The work starts as soon as the first bytes are copied. The host memory of
the copy is reused, because allocating new pages would take longer than copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Event, Thread

import torch
from torch import Tensor

from megaframe.checkpoint.shard_file import FileEntry, plan_entries, sort_by_alignment
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.direct_io import ALIGNMENT, allocate_aligned


class HostCopy:
    """`size` bytes that are being filled in order. Their memory is aligned and remains unchanged
    until the work on them is done."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._data: memoryview | None = None
        self._copied_bytes = 0
        self._failure: Exception | None = None
        self._changed = Condition()

    def wait_for_entry(self, entry: FileEntry) -> memoryview:
        """Wait until an entry has been copied and return its bytes. Raises the error if copying
        failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._copied_bytes >= entry.stop or self._failure is not None
            )
            if self._copied_bytes < entry.stop and self._failure is not None:
                raise self._failure
            assert self._data is not None
            return self._data[entry.start : entry.stop]

    def wait_for_memory(self) -> memoryview:
        """Wait for the memory to be allocated and return all of it, which may not be filled yet.
        Raises the error if that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._data is not None or self._failure is not None)
            if self._data is None:
                assert self._failure is not None
                raise self._failure
            return self._data

    def set_memory(self, data: memoryview) -> None:
        """Set the memory that the copy is made in."""
        with self._changed:
            self._data = data
            self._changed.notify_all()

    def mark_copied(self, stop: int) -> None:
        """Announce that all bytes before `stop` have been copied."""
        with self._changed:
            self._copied_bytes = stop
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Announce that copying failed."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()


BackgroundTask = Callable[[list[FileEntry], HostCopy], None]
"""A function that gets the file entries of the slices, with their byte ranges in the copy, and the
copy."""


class BackgroundCopier:
    """Runs one task at a time, in a daemon thread.

    An error is raised by the next `wait` or `poll`; after that the object can be used again.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._copy_done = Event()
        self._copy_event: torch.cuda.Event | None = None

    def start(self, slices: Sequence[Slice], work: BackgroundTask) -> None:
        """Copy the slices and do the work, both in the background.

        The slices must not change until `wait_for_copy` has returned. Waits for the previous work.

        Raises:
            ValueError: For slices that cannot be saved.
        """
        self.wait()
        nonempty = sort_by_alignment(slices)
        entries, tensors = plan_entries(nonempty)
        self._copy_done.clear()
        self._copy_event = None
        devices = {
            tensor_slice.tensor.device for tensor_slice in nonempty if tensor_slice.tensor.is_cuda
        }
        ready_event = None
        for device in devices:  # at most one, the rank's own
            self._stream = self._stream or torch.cuda.Stream(device)
            ready_event = torch.cuda.current_stream(device).record_event()
        copy = HostCopy(entries[-1].stop if entries else 0)
        copier = Thread(
            target=self._fill, args=(tensors, ready_event, copy), name="copy", daemon=True
        )
        run = (entries, copy, copier, work)
        self._thread = Thread(target=self._run, args=run, name="checkpoint", daemon=True)
        copier.start()
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the slices may change: until the copy is done or, on a device, until later
        work in the current stream is ordered after it."""
        if self._thread is None:
            return
        self._copy_done.wait()
        if self._copy_event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copy_event)

    def wait(self) -> None:
        """Wait until the work is done. Raises its error, if there was one."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def wait_at_most(self, seconds: float) -> None:
        """Wait at most `seconds` for the work, and raise nothing. To be called last."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self) -> bool:
        """Return whether no work is in progress. Raises the error of the last work, if there was
        one."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def _run(
        self, entries: list[FileEntry], copy: HostCopy, copier: Thread, work: BackgroundTask
    ) -> None:
        try:
            work(entries, copy)
        except Exception as error:  # `poll` raises it in the caller's thread
            self._failure = error
        finally:
            copier.join()  # because the next copy uses the same memory

    def _fill(
        self, tensors: list[Tensor], ready_event: torch.cuda.Event | None, copy: HostCopy
    ) -> None:
        try:
            if self._stream is not None:  # new threads start with device 0
                torch.cuda.set_device(self._stream.device)
            self._reserve(copy.size)
            copy.set_memory(self._buffer.numpy().data[: copy.size])
            if ready_event is None:
                self._copy(tensors, copy)
            else:
                self._copy_from_device(tensors, ready_event, copy)
        except Exception as error:  # `wait_for_entry` raises it in the thread that works
            copy.fail(error)
        finally:
            tensors.clear()
            self._copy_done.set()

    def _reserve(self, size: int) -> None:
        if self._buffer.numel() >= size:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # never hold both
        if self._stream is None:
            self._buffer = torch.from_numpy(allocate_aligned(size))
            return
        buffer = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        self._buffer = buffer[-buffer.data_ptr() % ALIGNMENT :]

    def _copy(self, tensors: Iterable[Tensor], copy: HostCopy) -> None:
        start = 0
        for tensor in tensors:
            start = self._start_copy(tensor, start)
            copy.mark_copied(start)

    def _copy_from_device(
        self, tensors: Iterable[Tensor], ready_event: torch.cuda.Event, copy: HostCopy
    ) -> None:
        """Copy from a device in a separate stream, overlapping with what the device computes after
        `ready_event`."""
        assert self._stream is not None
        self._stream.wait_event(ready_event)
        start, marks = 0, []
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                start = self._start_copy(tensor, start)
                marks.append((self._stream.record_event(), start))
            self._copy_event = self._stream.record_event()
        self._copy_done.set()
        for arrival, stop in marks:
            arrival.synchronize()
            copy.mark_copied(stop)

    def _start_copy(self, tensor: Tensor, start: int) -> int:
        """Start copying a tensor to offset `start` of the host memory. Returns the offset of its
        end."""
        stop = start + tensor.nbytes
        _make_view_like(tensor, self._buffer[start:stop]).copy_(tensor, non_blocking=True)
        return stop


def _make_view_like(tensor: Tensor, data: Tensor) -> Tensor:
    return data.view(tensor.dtype).view(tensor.shape)
