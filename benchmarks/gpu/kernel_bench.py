"""Measures kernels and prints one JSON object per line; `gpu_check.py` runs it in separate
processes.

    python benchmarks/gpu/kernel_bench.py --only norm attention [--dry]

An invalid memory access ends everything that a process can do on a GPU. Each implementation is
therefore announced before it runs and reported afterwards, and `--begin N` continues after one that
ended a process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
from kernel_timing import (  # noqa: E402  # noqa: E402
    Ceilings,
    Timing,
    measure_ceilings,
    measure_timing,
    time_copy,
    time_product,
)
from time_limit import LAST  # noqa: E402

_WORTH_COMPILING = frozenset(
    (
        "norm",
        "activation",
        "rotary",
        "qkv_rotary",
        "loss",
        "adamw",
        "square_sum",
        "router",
        "quantise",
        "decode_blocks",
    )
)
"""Kernels for which a compiler can compete. Each takes seconds to compile."""
COMPILED = "compiled"
"""Name, among the implementations, of the reference under torch.compile."""
REFERENCE = "reference"
MOST_ERROR = 0.05
"""With a larger error an implementation is wrong, whatever it was rounded to on the way."""
_LOST = 3
"""Exit status if this process cannot use its GPU any more."""


@dataclass(frozen=True)
class PassResult:
    """Forward or backward pass of an implementation.

    Attributes:
        bytes: The least that it moves.
        flops: The least that it computes.
        share: Of the ceiling that binds.
        copy_share: Of the speed of a copy of as many bytes, if bytes bind.
        product_share: Of the speed of the bare products of its shapes, if it consists of those.
    """

    seconds: float
    low: float
    high: float
    bytes: float
    flops: float
    share: float
    copy_share: float | None = None
    product_share: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One implementation on one case.

    Attributes:
        error: The largest error of its outputs and gradients, each relative to the norm of the
            true result in fp64, in a smaller size.
        trouble: Why a number is missing, in one line.
        details: The end of the traceback.
    """

    kernel: str
    case: str
    implementation: str
    forward: PassResult | None = None
    backward: PassResult | None = None
    error: float | None = None
    trouble: str | None = None
    details: str | None = None


def is_right(measured: dict[str, Any]) -> bool:
    """Return whether a measurement, as printed, has a result, and a right one."""
    return measured["trouble"] is None and (measured["error"] or 0.0) <= MOST_ERROR


def list_tensors(tree: Any) -> list[Any]:
    """Return all tensors in nested sequences."""
    import torch

    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in list_tensors(item)]
    return []


def list_names(kernel: Any, dry: bool) -> list[str]:
    """Return what can be measured: implementations, the reference, and the compiled reference."""
    compiled = [COMPILED] if kernel.name in _WORTH_COMPILING and not dry else []
    return [*kernel.implementations, REFERENCE, *compiled]


def run_of(kernel: Any, name: str) -> Callable[..., Any] | None:
    """Return the function to call, or None if this machine lacks it."""
    import torch

    if name == COMPILED:
        torch._dynamo.reset()
        return torch.compile(kernel.reference, dynamic=False)
    if name == REFERENCE:
        return kernel.reference
    implementation = kernel.implementations[name]
    return implementation.run if implementation.explain_absence() is None else None


def compute_error(kernel: Any, run: Callable[..., Any], case: Any) -> float:
    """Return the largest error of outputs and gradients, each relative to the norm of the true
    result.

    Raises:
        ValueError: If integers differ or an error is not finite.
    """
    import torch

    def convert(tree: Any, change: Callable[[Any], Any]) -> Any:
        if isinstance(tree, torch.Tensor) and tree.is_floating_point():
            return change(tree.detach()).requires_grad_(tree.requires_grad)
        return [convert(t, change) for t in tree] if isinstance(tree, list) else tree

    def run_passes(function: Callable[..., Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
        arguments = [convert(a, change) for a in inputs]
        outputs = list_tensors(function(*arguments, **case.options))
        return outputs, [t for t in list_tensors(arguments) if t.requires_grad]

    def compute_relative_error(name: str, actual: Any, expected: Any) -> float:
        if not expected.is_floating_point():
            if not torch.equal(actual.long(), expected.long()):
                raise ValueError(f"{name} differs")
            return 0.0
        size = expected.double().norm().item()
        error = (actual.double() - expected.double()).norm().item() / (size or 1.0)
        if not math.isfinite(error):
            raise ValueError(f"{name} is off by {error}")
        return error

    inputs = case.arguments()
    actual_outputs, leaves = run_passes(run, torch.Tensor.clone)
    expected_outputs, true_leaves = run_passes(kernel.reference, torch.Tensor.double)
    errors = [
        compute_relative_error(f"output {i}", actual.detach(), expected.detach())
        for i, (actual, expected) in enumerate(zip(actual_outputs, expected_outputs, strict=True))
    ]
    if leaves:
        pairs = [
            (m, t) for m, t in zip(actual_outputs, expected_outputs, strict=True) if t.requires_grad
        ]
        ahead = [torch.randn_like(actual) for actual, _ in pairs]
        actual = torch.autograd.grad([m for m, _ in pairs], leaves, ahead)
        wide = [g.to(t.dtype) for g, (_, t) in zip(ahead, pairs, strict=True)]
        expected = torch.autograd.grad([t for _, t in pairs], true_leaves, wide)
        both = enumerate(zip(actual, expected, strict=True))
        errors += [compute_relative_error(f"gradient {i}", m, t) for i, (m, t) in both]
    return max(errors)


def make_passes(
    case: Any, arguments: Sequence[Any], run: Callable[..., Any]
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Return functions of the forward and of the backward pass (None if there is none), which
    repeats that of one forward pass."""
    import torch

    def forward() -> Any:
        return run(*arguments, **case.options)

    if case.backward is None:
        return forward, None
    outputs = [t for t in list_tensors(forward()) if t.requires_grad]
    leaves = [t for t in list_tensors(list(arguments)) if t.requires_grad]
    gradients = [torch.randn_like(t) for t in outputs]

    def backward() -> Any:
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)

    return forward, backward


def time_case(
    case: Any, arguments: Sequence[Any], run: Callable[..., Any], dry: bool, few: bool
) -> tuple[Timing, Timing | None]:
    """Time forward and backward (None if there is no backward)."""
    forward, backward = make_passes(case, arguments, run)
    forth = measure_timing(forward, dry, few)
    return forth, None if backward is None else measure_timing(backward, dry, few)


def pass_of(work: Any, timing: Timing, ceilings: Ceilings, dry: bool) -> PassResult:
    """Compare a timing with what is possible."""
    seconds = timing.seconds
    copied = None if work.flops else time_copy(int(work.bytes) // 2, dry) / seconds
    bare = None
    if work.products:
        bare = sum(time_product(shape, dry) for shape in work.products) / seconds
    most = share(work, seconds, ceilings)
    values = timing.seconds, timing.low, timing.high, work.bytes, work.flops, most
    return PassResult(*values, copy_share=copied, product_share=bare)


def share(work: Any, seconds: float, ceilings: Ceilings) -> float:
    """Return the share of the ceiling that binds: the least possible time over the measured one."""
    return max(work.bytes / ceilings.copy, work.flops / ceilings.product) / seconds


def measure(
    case: Any, checked: Any, kernel: Any, name: str, ceilings: Ceilings, dry: bool
) -> Measurement | None:
    """Measure one implementation, or return None if this machine lacks it.

    Args:
        checked: The case in the size in which its result is checked; if the check fails to run,
            it is still timed.
    """
    label = (case.kernel, case.name, name)
    error = trouble = details = None
    try:
        run = run_of(kernel, name)
        if run is None:
            return None
        arguments = case.arguments()
        if name in kernel.implementations:
            reason = kernel.implementations[name].refuses(*arguments, **case.options)
            if reason:
                return Measurement(*label, trouble=reason)
        if name != COMPILED:
            try:
                error = compute_error(kernel, run, checked)
            except Exception as broken:
                trouble = f"check: {format_first_line(broken)}"
                details = traceback.format_exc()[-LAST:]
        forth, back = time_case(case, arguments, run, dry, few=name == REFERENCE)
        passes = (
            pass_of(case.forward, forth, ceilings, dry),
            pass_of(case.backward, back, ceilings, dry) if back is not None else None,
        )
        return Measurement(*label, *passes, error, trouble, details)
    except Exception as broken:
        return Measurement(
            *label,
            error=error,
            trouble=format_first_line(broken),
            details=traceback.format_exc()[-LAST:],
        )


def format_first_line(error: Exception) -> str:
    """Format an error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else 'no message'}"


def list_active(kernel: Any) -> list[str]:
    """Return the implementations of which a run on this chip uses the first that does not
    refuse."""
    from megaframe_kernels.selection import select

    return [
        *(
            implementation.name
            for implementation in select({kernel.name: kernel})[kernel.name].order
        ),
        REFERENCE,
    ]


def yield_lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what is printed. Ends the process if it cannot use its GPU any more."""
    import torch
    from kernel_cases import MIDDLE, REAL, TINY, list_cases
    from megaframe_kernels.registry import KERNELS

    ceilings = (
        Ceilings(*arguments.ceilings) if arguments.ceilings else measure_ceilings(arguments.dry)
    )
    if not arguments.ceilings:
        yield {"ceilings": asdict(ceilings)}
    if not arguments.begin:
        yield {"active": {name: list_active(KERNELS[name]) for name in arguments.only}}
    sizes = (TINY, TINY) if arguments.dry else (REAL, MIDDLE)
    todo = [
        (case, checked, KERNELS[case.kernel], name)
        for case, checked in zip(*map(list_cases, sizes), strict=True)
        if case.kernel in arguments.only
        for name in list_names(KERNELS[case.kernel], arguments.dry)
    ]
    yield {"todo": [[case.kernel, case.name, name] for case, _, _, name in todo]}
    for number, entry in enumerate(todo[arguments.begin :], arguments.begin):
        yield {"begun": number}
        measurement = measure(*entry, ceilings, arguments.dry)
        if measurement is not None:
            yield {"measured": asdict(measurement)}
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                traceback.print_exc()
                sys.exit(_LOST)
            torch.cuda.empty_cache()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", required=True, metavar="KERNEL")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="leave out the first")
    parser.add_argument("--ceilings", type=float, nargs=2, metavar=("COPY", "PRODUCT"))
    arguments = parser.parse_args()
    import torch

    has_gpu = torch.cuda.is_available()
    if arguments.dry and not has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu else "cpu"):
        for line in yield_lines(arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
