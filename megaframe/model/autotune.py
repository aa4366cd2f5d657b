"""Autotune: which of torch's routines multiply matrices and compute attention on this CPU, measured
when a run starts.

The measurement takes at most `BUDGET` seconds and is made by the first rank for all. It is kept in
a cache of the user by processor, torch version, threads and type, and in the checkpoints of the
run, so that a resumed run computes bitwise what the uninterrupted one would. Calls during which a
thread had to wait for a processor do not count; on a machine so busy that no others are left, the
routines of torch are taken, and nothing is kept. The log of a run says what it uses and why, and
its first lines say if another run of the same config may choose otherwise. On a GPU, and in fp64,
there is nothing to choose.

A file of the cache belongs to one machine, and the first process that writes it wins: runs that
start at the same time then compute alike. A file that is damaged, of another machine or of another
version is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from megaframe.config import RunSection, TrainConfig
from megaframe.config.schema import KernelsConfig
from megaframe.distributed.mesh import Mesh
from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import open_file
from megaframe.ops import attention_tiles, cpu_attention, matmul
from megaframe.ops.cpu_attention import AttentionMethod, AttentionSize
from megaframe.ops.cpu_routines import CPURoutines
from megaframe.ops.matmul import MatmulKind, MatmulLibrary
from megaframe.parameters.parameter import PRECISIONS

BUDGET = 0.2
"""Seconds after which nothing more is measured, so that all of it takes at most 0.3 s."""
_HOPELESS = 2.0
"""A candidate this many times slower than the best on a small problem is not tried on a larger
one."""
_DISTURBED = 0.02
"""Share of a call that its threads may wait for a processor; less than `_TIE` distinguishes."""
_TRIES = 6
"""Calls of a small problem, after one that prepares."""
_LEAST_TRIES = 3
"""Calls that are made however long they take."""
_TIE = 1.03
"""The first candidate, torch's own routine, is taken unless another one is faster by this."""
_SHAPES: Mapping[MatmulKind, tuple[int, int, int]] = {
    "dense": (256, 1024, 1024),
    "into": (256, 1024, 1024),
    "gradient": (1024, 512, 512),
    "experts": (128, 512, 1024),
    "batched": (256, 64, 512),
}
"""Rows, inner and columns of the measured products: one to a few milliseconds of two cores each,
and operands and results that are larger than a core's own cache, as those of a model are."""
_HEADS: Mapping[AttentionSize, tuple[int, int]] = {"short": (8, 256), "long": (1, 1024)}
"""Heads and tokens of the measured attention."""
_THREADS = "/proc/self/task"
_MAX_BYTES = 1 << 16
"""Size of the largest file of the cache that is read."""
_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables by which the libraries leave out instructions that the processor has."""
_T = TypeVar("_T", bound=str)


class MachineBusyError(Exception):
    """Every call of a candidate was disturbed by other work on this machine."""


class RoutineChoice(NamedTuple):
    """The routines of a run.

    Attributes:
        routines: The routines.
        why: Where they come from.
        is_kept: Whether other runs on this machine will use them too.
    """

    routines: CPURoutines
    why: str
    is_kept: bool = True


class _CacheEntry(BaseModel):
    """A file of the cache."""

    model_config = ConfigDict(extra="forbid", strict=True)

    machine: dict[str, str | int]
    routines: CPURoutines


def tune(
    run: RunSection,
    train: TrainConfig,
    kernels: KernelsConfig,
    recorded: CPURoutines | None,
    mesh: Mesh | None = None,
) -> tuple[CPURoutines, list[str], list[str]]:
    """Choose the routines of a run, and take them into use in this process.

    Args:
        run: The section, which may ask for deterministic ones.
        train: The section, which has the precision.
        kernels: The section, which may name a library.
        recorded: What the run has used so far, from its checkpoint.
        mesh: The ranks of the run, which must all call this; None for a program of one process on
            the CPU, such as generation.

    Returns:
        The routines; lines for the run's log, none where there is nothing to choose; and lines for
        the start of the run, none unless another run of this config may choose otherwise.
    """
    dtype = PRECISIONS[train.precision].compute
    on_cpu = mesh is None or mesh.device.type == "cpu"
    if not on_cpu or len(matmul.list_libraries(dtype)) == 1:
        return CPURoutines(), [], []
    library = kernels.matmul
    if library != "auto":
        choice = RoutineChoice(make_named_routines(dtype, library), f"kernels.matmul={library}")
    elif recorded is not None and recorded.is_available(dtype):
        choice = RoutineChoice(recorded, "as the checkpoint records")
    elif run.deterministic:
        choice = RoutineChoice(make_named_routines(dtype, "torch"), "run.deterministic")
    elif mesh is None:
        choice = load_or_measure(dtype)
    else:
        choice = _share_first_ranks_choice(dtype, mesh)
    routines, why, is_kept = choice
    matmul.use_libraries(dtype, routines.products)
    cpu_attention.use_methods(dtype, routines.attention)
    details = [f"matrix products and attention on this CPU ({why}): {routines.describe()}"]
    if is_kept:
        return routines, details, []
    note = (
        "the routines of matrix products and attention are those of this run and its resumes alone "
        f"({why}): another run of this config may choose others, and differ from it in the last "
        "bits; kernels.matmul=torch gives all runs the same"
    )
    return routines, details, [note]


def make_named_routines(dtype: torch.dtype, library: str) -> CPURoutines:
    """Return the routines if one library is named for all products.

    Args:
        dtype: Type of the operands.
        library: `torch`, or `onednn` where torch would use MKL.
    """
    default = matmul.get_default_library(dtype)
    if library == "onednn" and (default != "torch" or dtype is torch.float32):
        named: MatmulLibrary = "onednn" if dtype is torch.float32 else "fp32-onednn"
        default = named if named in matmul.list_libraries(dtype) else default
    return CPURoutines(
        type=str(dtype),
        products={kind: default for kind in matmul.KINDS},
        attention={
            size: cpu_attention.get_default_method(dtype, size) for size in cpu_attention.SIZES
        },
    )


def _share_first_ranks_choice(dtype: torch.dtype, mesh: Mesh) -> RoutineChoice:
    """Return the routines that the first rank has in its cache or measures."""
    key = f"autotune/{dtype}"
    if mesh.rank == 0:
        choice = load_or_measure(dtype)
        mesh.store.set(key, json.dumps([choice.routines.model_dump(), *choice[1:]]))
        return choice
    routines, *rest = json.loads(mesh.store.get(key))
    return RoutineChoice(CPURoutines.model_validate(routines), *rest)


def load_or_measure(dtype: torch.dtype) -> RoutineChoice:
    """Return the routines for a type on this machine."""
    machine = describe_machine(dtype)
    path = find_cache_file(machine)
    cached = read_cache(path, machine) if path else None
    if cached is not None and cached.is_available(dtype):
        return RoutineChoice(cached, f"measured before, kept in {path}")
    start = time.perf_counter()
    try:
        measured = measure(dtype)
    except MachineBusyError:
        why = "torch's own, because other work keeps this machine too busy to measure any"
        return RoutineChoice(make_named_routines(dtype, "torch"), why, is_kept=False)
    why = f"measured in {time.perf_counter() - start:.2f} s"
    kept = None if path is None else _write_cache(path, machine, measured)
    if kept is None:
        why += f", not kept: {'there is no home folder' if path is None else f'no file {path}'}"
        return RoutineChoice(measured, why, is_kept=False)
    if kept != measured:
        why = f"kept in {path} by a run that measured at the same time"
        return RoutineChoice(kept, why)
    return RoutineChoice(measured, f"{why}, kept in {path}")


def describe_machine(dtype: torch.dtype) -> dict[str, str | int]:
    """Return what the speed of a routine depends on, and its type."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    facts = dict(line.split(":", 1) for line in lines.split("\n\n")[0].splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    parts = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return {
        "processor": " ".join(named.get(part, "") for part in parts),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ.get(name, "") for name in _SETTINGS},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "type": str(dtype),
    }


def find_cache_file(machine: Mapping[str, str | int]) -> Path | None:
    """Return the file of the user's cache for this machine; None for a user without a home."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return home / "megaframe" / f"autotune-{digest}.json"


def read_cache(path: Path, machine: Mapping[str, str | int]) -> CPURoutines | None:
    """Return the routines in a file of the cache; None if there is none, if it is damaged, of
    another machine, or of a version with fewer kinds of products."""
    try:
        with open_file(path) as file:
            entry = _CacheEntry.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
    complete = entry.routines.products.keys() == set(matmul.KINDS)
    return entry.routines if complete and entry.machine == dict(machine) else None


def _write_cache(
    path: Path, machine: dict[str, str | int], measured: CPURoutines
) -> CPURoutines | None:
    """Write a file of the cache and return what it holds afterwards: that of another process if it
    was faster. None if it cannot be written, so that the next run measures again."""
    written = path.with_suffix(f".{secrets.token_hex(4)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = _CacheEntry(machine=machine, routines=measured)
        write_file(written, entry.model_dump_json(indent=1))
        try:
            os.link(written, path)  # fails if the file exists, as a rename would not
        except FileExistsError:
            first = read_cache(path, machine)
            if first is not None:
                return first
            os.replace(written, path)
        finally:
            written.unlink(missing_ok=True)
        return measured
    return None


def measure(dtype: torch.dtype) -> CPURoutines:
    """Return the fastest routines for a type, in at most about `BUDGET` seconds.

    Raises:
        MachineBusyError: If one of them could not be measured.
    """
    end = time.perf_counter() + BUDGET
    methods = cpu_attention.list_methods(dtype)
    default = make_named_routines(dtype, "torch")
    products, attention = default.products, default.attention
    num_left = len(products) + len(attention)
    before = matmul.get_libraries_in_use(dtype), cpu_attention.get_methods_in_use(dtype)

    def compute_deadline() -> float:
        """Return when the next measurement must end: all get an equal part of what is left."""
        nonlocal num_left
        now = time.perf_counter()
        num_left -= 1
        return now + (end - now) / (num_left + 1)

    try:
        for kind in products:
            work = partial(_multiply, dtype, kind)
            products[kind] = find_fastest(
                matmul.list_libraries(dtype), work, compute_deadline(), products[kind]
            )
        matmul.use_libraries(
            dtype, products
        )  # attention is measured with the products that it will use
        for size in attention:
            attend = partial(_attend, dtype, size)
            attention[size] = find_fastest(methods, attend, compute_deadline(), attention[size])
    finally:
        matmul.use_libraries(dtype, before[0])
        cpu_attention.use_methods(dtype, before[1])
    return CPURoutines(type=str(dtype), products=products, attention=attention)


def find_fastest(
    candidates: Sequence[_T],
    prepare: Callable[[_T, bool], Callable[[], object]],
    end: float,
    default: _T,
) -> _T:
    """Return the candidate whose work takes least time, or the first one if it takes at most
    `_TIE` more, or `default` if there is no time left.

    Candidates take turns and the least time of each counts, because other work on the machine only
    adds to it.

    Args:
        candidates: Names of what to compare.
        prepare: Returns a function that does a candidate's work, on a small problem if its second
            argument is set.
        end: Time of `time.perf_counter` after which nothing is started.
        default: Taken if there is no time left.

    Raises:
        MachineBusyError: A candidate has no undisturbed call.
    """
    if len(candidates) == 1 or time.perf_counter() >= end:
        return default
    now = time.perf_counter()
    share = (end - now) / (2 * len(candidates))  # half of the time at most
    small = {name: _measure_seconds(prepare(name, True), share) for name in candidates}
    limit = _HOPELESS * min(small.values())
    runs = {name: prepare(name, False) for name in candidates if small[name] <= limit}
    best = dict.fromkeys(runs, math.inf)
    rounds = 0
    while len(runs) > 1 and (rounds < 2 or time.perf_counter() < end):
        for name, call in runs.items():
            best[name] = min(best[name], _time_call(call))
        rounds += 1
    first = next(iter(runs))
    if math.inf in (*small.values(), *(best.values() if rounds else ())):
        raise MachineBusyError
    quickest = min(best, key=lambda name: best[name])
    return first if best[first] <= _TIE * best[quickest] else quickest


def _time_call(call: Callable[[], object]) -> float:
    """Return how long a call takes; infinity if its threads had to wait for a processor."""
    start, before = time.perf_counter(), read_waiting_seconds()
    call()
    waiting, seconds = read_waiting_seconds() - before, time.perf_counter() - start
    return seconds if waiting <= _DISTURBED * seconds else math.inf


def read_waiting_seconds() -> float:
    """Return the seconds for which the threads of this process together were ready to run but had
    no processor; 0 on a system that does not say (Linux: Documentation/scheduler/sched-stats)."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir(_THREADS):
            with open(f"{_THREADS}/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])
    return total / 1e9


def _measure_seconds(call: Callable[[], object], limit: float) -> float:
    """Return the least seconds of `_TRIES` calls, fewer if they take more than `limit` together,
    but never so few that one disturbance decides, and more if all were disturbed. One more comes
    first, which prepares threads, code and memory, and may take much longer."""
    call()
    end = time.perf_counter() + limit
    least, tries = math.inf, 0
    while tries < _LEAST_TRIES or time.perf_counter() <= end:
        least, tries = min(least, _time_call(call)), tries + 1
        if tries >= _TRIES and least < math.inf:
            break
    return least


def _multiply(
    dtype: torch.dtype, kind: MatmulKind, library: MatmulLibrary, small: bool
) -> Callable[[], object]:
    """Return a function that computes a product of a kind by a library."""
    rows, inner, columns = _SHAPES[kind]
    if small:
        # Not the rows, whose number decides between the kinds `dense` and `experts`.
        inner, columns = inner // 4, columns // 4
    if kind == "batched":
        left, right = (
            _make_operand(dtype, 8, rows, inner),
            _make_operand(dtype, 8, inner, columns),
        )
        return _multiply_by(dtype, kind, library, lambda: matmul.multiply_batched(left, right))
    if kind == "gradient":  # both operands are rows of tokens, and the result is added in fp32
        dy, x = _make_operand(dtype, inner, rows), _make_operand(dtype, inner, columns)
        grad = torch.zeros(rows, columns, dtype=torch.promote_types(dtype, torch.float32))
        add = partial(matmul.write_weight_gradient, grad, dy, x, add=True)
        return _multiply_by(dtype, kind, library, add)
    left, right = _make_operand(dtype, rows, inner), _make_operand(dtype, columns, inner).t()
    if kind == "into":
        out = torch.empty(rows, columns, dtype=dtype)
        return _multiply_by(dtype, kind, library, lambda: matmul.multiply_into(out, left, right))
    return _multiply_by(dtype, kind, library, lambda: matmul.multiply(left, right))


def _multiply_by(
    dtype: torch.dtype, kind: MatmulKind, library: MatmulLibrary, call: Callable[[], object]
) -> Callable[[], None]:
    def run_work() -> None:
        matmul.use_libraries(dtype, {kind: library})
        call()

    return run_work


def _attend(
    dtype: torch.dtype, size: AttentionSize, method: AttentionMethod, small: bool
) -> Callable[[], None]:
    """Return a function that computes causal attention, forward and backward, by a method."""
    heads, length = _HEADS[size]
    if small:
        length //= 8
    query, key, value, d_out = (_make_operand(dtype, 1, length, heads, 64) for _ in range(4))

    def run_work() -> None:
        cpu_attention.use_methods(dtype, dict.fromkeys(cpu_attention.SIZES, method))
        out, lse = attention_tiles.attend(query, key, value, None, causal=True, scale=0.125)
        attention_tiles.attend_backward(
            d_out, query, key, value, out, lse, None, causal=True, scale=0.125
        )

    return run_work


def _make_operand(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return small numbers that are not random: those of the run must not depend on them."""
    count = math.prod(shape)
    return torch.linspace(-1.0, 1.0, count).view(shape).to(dtype)
