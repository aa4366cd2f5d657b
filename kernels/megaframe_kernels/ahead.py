"""Compiles what the wrappers launch, for chips that need not be present, and reports what the
machine code needs.

    python -m megaframe_kernels.ahead --chips 80 90 100

prints for each kernel and chip the registers, shared memory, and stack and spill bytes that the
assembler reports. The exit status is 1 if anything uses the stack, spills, does not fit or has
matrix products that wait for each other. Wrappers are called with tensors that have a shape and a
type but no memory, so their sizes can be those of real runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megaframe_kernels.device import INTERPRETED, Launch, capture_launches
from megaframe_kernels.examples import EXAMPLES, Example

CHIPS = (80, 90, 100)
TENSOR_MEMORY = 512
"""Columns of tensor memory that a program may have from sm_100 on."""
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may use, by compute capability."""
_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


@dataclass(frozen=True)
class Usage:
    """What the machine code of one kernel needs.

    Attributes:
        kernel: Name of the kernel.
        example: The launch that it was compiled for.
        chip: Compute capability, such as 90.
        registers: Per thread.
        stack: Bytes.
        shared: Bytes of shared memory.
        spill_stores: Bytes.
        spill_loads: Bytes.
        matrix: The instruction of its products.
        serial: The assembler makes each of them wait for the one before, because registers do not
            suffice for several in flight.
        columns: Of tensor memory.
    """

    kernel: str
    example: str
    chip: int
    registers: int
    stack: int
    shared: int
    spill_stores: int
    spill_loads: int
    matrix: str
    serial: bool = False
    columns: int = 0

    @property
    def clean(self) -> bool:
        """Whether everything stays in registers and fits in its memories, and no product is
        serial."""
        spilled = self.stack or self.spill_stores or self.spill_loads
        fits = self.shared <= SHARED_LIMITS[self.chip] and self.columns <= TENSOR_MEMORY
        return fits and not spilled and not self.serial


def compile_example(example: Example, chip: int) -> Iterator[Usage]:
    """Compile every kernel that an example launches, for one chip."""
    # Collected first, compiled after: the wrappers run with tensors without memory.
    launches: list[Launch] = []
    with capture_launches(launches.append, chip):
        example.call()
    for launch in launches:
        yield _compile(launch, example.name, chip)


def _compile(launch: Launch, example: str, chip: int) -> Usage:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    for index, name in enumerate(launch.kernel.arg_names):
        special = not launch.kernel.params[index].do_not_specialize
        kind, aligned = _describe(values[name], name in launch.constants, special)
        signature[name] = kind
        if kind == "constexpr":
            constants[(index,)] = values[name]
        elif aligned:
            # What Triton's launcher derives from the value: it decides the width of loads.
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    # The assembler reports only when it runs, not when its result is found in a cache.
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(StringIO()) as report:
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    return _read(launch.kernel.__name__, example, chip, compiled, report.getvalue())


def _describe(value: Any, constant: bool, special: bool) -> tuple[str, bool]:
    """Describe a value as Triton's launcher would: its type, and whether it is divisible by 16.

    Args:
        value: The argument.
        constant: Whether it is a `tl.constexpr`.
        special: Whether the kernel is specialised on the value being 1 or divisible by 16.
    """
    if constant or value is None or (special and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, Tensor):
        return _TYPES[value.dtype], True
    if isinstance(value, int):
        # Triton types an integer by its value, and specialises on 16 dividing it.
        return "i32" if -(2**31) <= value < 2**31 else "i64", special and value % 16 == 0
    return "fp32", False


def _read(kernel: str, example: str, chip: int, compiled: Any, report: str) -> Usage:
    """Read the report of the assembler that Triton called."""
    matrix = [m for m in ("wgmma", "tcgen05.mma", "mma.sync") if m in compiled.asm["ptx"]]
    return Usage(
        kernel,
        example,
        chip,
        _parse_number(r"Used (\d+) registers", report),
        # Registers alone do not tell: what does not fit goes to the stack, which is memory.
        _parse_number(r"(\d+) bytes stack frame", report),
        compiled.metadata.shared,
        _parse_number(r"(\d+) bytes spill stores", report),
        _parse_number(r"(\d+) bytes spill loads", report),
        matrix[0] if matrix else "",
        "instructions are serialized" in report,
        getattr(compiled.metadata, "tmem_size", 0),
    )


def _parse_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the assembler's report has no {pattern!r}:\n{text}")
    return int(match.group(1))


def format_table(usages: Iterable[Usage]) -> str:
    """Format the usages as aligned text; those that are not clean are marked."""
    rows = [f"{'kernel':<24}{'example':<34}{'sm':>4}{'regs':>6}{'shared':>8}{'spills':>8}  matrix"]
    for u in usages:
        spills = u.stack + u.spill_stores + u.spill_loads
        rows.append(
            f"{u.kernel:<24}{u.example:<34}{u.chip:>4}{u.registers:>6}{u.shared:>8}{spills:>8}"
            f"  {u.matrix}{', serial' if u.serial else ''}{'' if u.clean else '  <- not clean'}"
        )
    return "\n".join(rows)


def main(examples: Mapping[str, Callable[[], Iterable[Example]]] = EXAMPLES) -> int:
    """Run the command. The exit status says whether all kernels are clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", type=int, nargs="+", default=list(CHIPS), choices=CHIPS)
    parser.add_argument("--kernels", nargs="+", default=list(examples), choices=list(examples))
    parser.add_argument("--examples", metavar="NAME", nargs="+", help="those of these names alone")
    arguments = parser.parse_args()
    if INTERPRETED:
        parser.error("the interpreter is on; unset TRITON_INTERPRET")
    usages = [
        usage
        for name in arguments.kernels
        for example in examples[name]()
        if arguments.examples is None or example.name in arguments.examples
        for chip in arguments.chips
        if chip >= example.least_chip
        for usage in compile_example(example, chip)
    ]
    print(format_table(usages))
    return 0 if all(usage.clean for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
