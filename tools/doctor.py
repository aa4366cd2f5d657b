"""Say what this machine can do for a run, and what prevents a run: `python tools/doctor.py`. With
`--ranks 8`, or `--ranks` under torchrun, say whether several ranks work together.

Status 1 means that a run cannot start. All checks are made even if some of them fail; a check that
breaks is a line of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_QUERY = (
    "index",
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "memory.used",
    "memory.total",
)
_SLOWED = {
    0x2: "clocks set by an application",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Throttle reasons that are worth a warning, by bit; idle, power cap and the rest are normal."""
_TRIAL = 256 * 2**20
_LEAST_FREE = 2**30


@dataclass(frozen=True)
class HostFinding:
    """A line of the report.

    Attributes:
        subject: Its subject.
        level: Ok, warning (slow or unusual), or error (no run can start).
    """

    subject: str
    message: str
    level: str = "ok"


def read_gpus(text: str) -> list[dict[str, str]]:
    """Parse the output of nvidia-smi into a dictionary for each GPU, by the fields of `_QUERY`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def judge_gpu(gpu: Mapping[str, str]) -> Iterator[HostFinding]:
    """Yield findings on the state of one GPU: clocks, memory in use, memory errors."""
    subject = f"GPU {gpu['index']}"
    clocks = f"{gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz, {gpu['temperature.gpu']} C"
    yield HostFinding(subject, f"{gpu['name']}, driver {gpu['driver_version']}, {clocks}")
    bits = _parse_number(gpu["clocks_throttle_reasons.active"])
    slowed = [reason for bit, reason in _SLOWED.items() if bits & bit]
    if slowed:
        yield HostFinding(subject, f"slowed: {', '.join(slowed)}", "warning")
    used_mib, total_mib = _parse_number(gpu["memory.used"]), _parse_number(gpu["memory.total"])
    if total_mib and used_mib > 0.1 * total_mib:
        yield HostFinding(subject, f"{used_mib} of {total_mib} MiB are in use by others", "warning")
    errors = _parse_number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        yield HostFinding(
            subject, f"{errors} uncorrected memory errors: replace or reset it", "error"
        )
    elif gpu["ecc.mode.current"] == "Disabled":
        yield HostFinding(subject, "ECC is off: flipped bits go unnoticed", "warning")


def _parse_number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:  # [N/A]: not every GPU reports every field
        return 0


def read_smi() -> list[dict[str, str]]:
    """Return the GPUs that nvidia-smi lists; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return read_gpus(completed.stdout) if completed.returncode == 0 else []


def judge_software() -> Iterator[HostFinding]:
    """Yield versions, the state of GPUs, and whether torch can use those that the driver knows."""
    import torch
    from megaframe_kernels.installed import read_versions

    from megaframe.distributed.device import explain_hidden_gpu, explain_unusable_gpu

    installed = ", ".join(f"{name} {version}" for name, version in read_versions().items())
    yield HostFinding("software", f"Python {platform.python_version()}, {installed}")
    gpus, num_visible = read_smi(), torch.cuda.device_count()
    for gpu in gpus:
        yield from judge_gpu(gpu)
    if len(gpus) > num_visible:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            text = f"torch sees {num_visible} of {len(gpus)} GPUs: CUDA_VISIBLE_DEVICES={hidden}"
            yield HostFinding("torch", text, "warning")
        else:
            text = f"torch {torch.__version__} sees {num_visible} of {len(gpus)} GPUs"
            yield HostFinding("torch", text, "error" if num_visible else "warning")
    if not num_visible:
        if reason := explain_unusable_gpu():
            yield HostFinding("torch", f"no GPU that a run can use: {reason}", "error")
            return
        hidden = f" ({reason})" if (reason := explain_hidden_gpu()) else ""
        yield HostFinding("torch", f"no GPU: a run uses the CPU, {os.cpu_count()} cores{hidden}")
        return
    for index in range(num_visible):
        yield _check_gpu(index)
    if torch.distributed.is_nccl_available():
        yield HostFinding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield HostFinding(
            "NCCL", "torch was built without it", "error" if num_visible > 1 else "warning"
        )


def _check_gpu(index: int) -> HostFinding:
    import torch

    try:
        with torch.cuda.device(index):
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
            right = bool(((ones @ ones) == 64).all())
    except RuntimeError as error:
        return HostFinding(f"GPU {index}", f"cannot compute: {str(error).splitlines()[0]}", "error")
    return HostFinding(
        f"GPU {index}", "computes" if right else "computes wrong", _choose_level(right)
    )


def _choose_level(right: bool) -> str:
    return "ok" if right else "error"


def judge_links() -> Iterator[HostFinding]:
    """Yield the bandwidth from the first GPU to each other one."""
    import torch

    for other in range(1, torch.cuda.device_count()):
        peer = torch.cuda.can_device_access_peer(0, other)
        source = torch.empty(_TRIAL, dtype=torch.uint8, device="cuda:0")
        target = torch.empty_like(source, device=f"cuda:{other}")
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize(0)
            begun = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(other)
            torch.cuda.synchronize(0)
            seconds.append(time.perf_counter() - begun)
        how = "directly" if peer else "through the host: no peer access"
        text = f"{_TRIAL / min(seconds) / 1e9:.0f} GB/s {how}"
        yield HostFinding(f"link 0 to {other}", text, "ok" if peer else "warning")


def judge_kernels() -> Iterator[HostFinding]:
    """Yield for each kernel the implementation that is used, and why preferred ones are not."""
    from megaframe_kernels.registry import KERNELS
    from megaframe_kernels.selection import read_chip_name, select

    chip = read_chip_name()
    for name, choice in select(KERNELS).items():
        absent = "; ".join(f"not {other}: {reason}" for other, reason in choice.absent.items())
        yield HostFinding(f"kernel {name}", f"{choice.active}{f' ({absent})' if absent else ''}")
    yield HostFinding("kernels", f"order of implementations for {chip}: see choices.json")


def judge_disk(folder: Path) -> Iterator[HostFinding]:
    """Yield the free space of a folder's disk, and the speed of a durable write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < _LEAST_FREE:
            yield HostFinding(
                "disk", f"{folder} has {free / 1e9:.1f} GB free; 1 is needed", "error"
            )
            return
        block = os.urandom(2**20)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            for _ in range(_TRIAL // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = _TRIAL / (time.perf_counter() - begun)
    except OSError as error:
        yield HostFinding("disk", f"{folder} cannot be written: {error.strerror}", "error")
        return
    text = f"{folder}: {speed / 1e6:,.0f} MB/s durable, {free / 1e9:,.0f} GB free"
    yield HostFinding("disk", text, "ok" if speed > 50e6 else "warning")


def run_checks(checks: Sequence[Callable[[], Iterator[HostFinding]]]) -> Iterator[HostFinding]:
    """Yield the findings of all checks; a check that raises an exception is a finding itself."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            yield HostFinding(check.__name__.removeprefix("judge_"), f"broke: {first}", "error")


def main() -> int:
    """Print all findings; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="where runs will be written"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="?",
        const=0,
        help="instead, check how this many ranks of this machine work together; no number under "
        "torchrun",
    )
    parser.add_argument("--device", default="auto", help="of the ranks, as run.device")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a part at most")
    parser.add_argument("--parts", default="", help="names of parts begin with one of these: a,b")
    parser.add_argument(
        "--report", type=Path, default=Path("runs/doctor/report"), help="files to write"
    )
    arguments = parser.parse_args()
    folder = arguments.folder
    from wheels import use_wheels

    if note := use_wheels():
        print(note, flush=True)
    if (ROOT / "kernels").is_dir():
        sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    if arguments.ranks is not None:
        if arguments.ranks == 0 and "WORLD_SIZE" not in os.environ:
            parser.error("--ranks needs a number, such as --ranks 2, unless torchrun starts this")
        if arguments.ranks == 1 or os.environ.get("WORLD_SIZE") == "1":
            parser.error("--ranks needs 2 or more ranks")
        from doctor_ranks import check_ranks

        chosen = [prefix for prefix in arguments.parts.split(",") if prefix]
        return check_ranks(
            arguments.ranks,
            arguments.report,
            timeout=arguments.timeout,
            device=arguments.device,
            chosen=chosen,
        )

    def judge_folder() -> Iterator[HostFinding]:
        return judge_disk(folder)

    num_errors = 0
    for finding in run_checks((judge_software, judge_links, judge_kernels, judge_folder)):
        mark = {"ok": " ", "warning": "!", "error": "X"}[finding.level]
        print(f"{mark} {finding.subject:<28} {finding.message}", flush=True)
        num_errors += finding.level == "error"
    print(
        "a run can start"
        if not num_errors
        else f"a run cannot start: {num_errors} errors above (X)"
    )
    return 1 if num_errors else 0


if __name__ == "__main__":
    if (ROOT / "kernels").is_dir():
        sys.path.insert(0, str(ROOT))
    from megaframe.io.closed_output import allow_closed_output

    with allow_closed_output():
        sys.exit(main())
