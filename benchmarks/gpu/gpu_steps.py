"""The steps of `gpu_check.py`, the most important first: what each does, and how long it may take.

Fifteen minutes on a GPU do not suffice for all of them. What is worth most comes first, and a step
that hangs costs its own limit and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LONGEST_LINE = 400
"""Characters of a line of a verdict."""
_OF_KERNELS = "kernels"
"""The tests that are not of whole steps."""


@dataclass(frozen=True)
class Step:
    """What is done together. The parts are done in this order.

    Attributes:
        seconds: The most that it may take.
        smoke: Whether to train one step of the demo, beside the same on the CPU.
        tests: Names in `gpu_tests.TESTS`.
        kernels: Names of kernels that are measured.
        rows: Rows of `training_gpu.ROWS`.
        constants: Whether to measure the planner's constants of the chip.
    """

    name: str
    seconds: float
    smoke: bool = False
    tests: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    constants: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of what is to do."""
        alone = [name for name in ("smoke", "constants") if getattr(self, name)]
        return (*alone, *(f"tests of {name}" for name in self.tests), *self.kernels, *self.rows)


_ELEMENTWISE = "activation", "rotary", "qkv_rotary"
STEPS = (
    Step("smoke", 40, smoke=True),
    Step("slice", 150, rows=("llama-8b-slice",)),
    Step("attention", 120, kernels=("attention",)),
    Step("kernels", 120, kernels=("norm", "adamw", "loss", *_ELEMENTWISE, "square_sum")),
    Step("graphs", 120, tests=("graphs",), rows=("gpt2-124m-graph",)),
    Step("host", 90, rows=("llama-8b-slice-host", "moe-slice-host")),
    Step("fp8", 75, rows=("llama-8b-slice-fp8",)),
    Step("experts", 150, rows=("moe-slice",)),
    Step("exactness", 150, tests=("kernels",)),
    Step("products", 120, kernels=("grouped_product", "grouped_gradient")),
    Step("constants", 45, constants=True),
    Step("gpt2", 120, rows=("gpt2-124m",)),
    Step("gpt", 150, rows=("gpt-1.3b",)),
    Step("layouts", 120, tests=("layouts",)),
    Step(
        "products-fp8",
        120,
        kernels=(
            *("grouped_scaled_product", "grouped_scaled_gradient"),
            *("quantise_columns", "quantise_experts", "quantise"),
        ),
    ),
    Step(
        "routing",
        120,
        kernels=("router", "expert_order", "permute", "unpermute", "attention_backward"),
    ),
    Step("recurrent", 60, kernels=("delta_rule", "ssd")),
    Step("codes", 45, kernels=("decode_blocks",)),
    Step("sparse", 60, kernels=("sparse_attention", "attention_shares")),
    Step("sparse-slice", 150, rows=("sparse-slice", "sparse-slice-latents")),
)
KERNELS = tuple(name for step in STEPS for name in step.kernels)


def select_steps(
    names: Sequence[str] = (),
    kernels: Sequence[str] = (),
    rows: Sequence[str] = (),
    only_training: bool = False,
    skip_training: bool = False,
    skip_tests: bool = False,
) -> list[Step]:
    """Return the steps of these names, in their own order, without the parts that are left out.
    Kernels that are named leave out all other parts but their tests, and so do rows."""
    has_kernels = not (only_training or rows)
    has_rows = not (skip_training or kernels)
    has_both = has_kernels and has_rows

    def select_parts(step: Step) -> Step:
        tests = (t for t in step.tests if (has_kernels if t == _OF_KERNELS else has_rows))
        return replace(
            step,
            smoke=step.smoke and has_both,
            constants=step.constants and has_both,
            tests=() if skip_tests else tuple(tests),
            kernels=tuple(k for k in step.kernels if has_kernels and k in (kernels or KERNELS)),
            rows=tuple(r for r in step.rows if has_rows and (not rows or r in rows)),
        )

    chosen = map(select_parts, (step for step in STEPS if not names or step.name in names))
    return [step for step in chosen if step.parts]


def was_done(step: Step, record: Mapping[str, Any] | None) -> bool:
    """Return whether an earlier call did all of a step, or gave it all of its time."""
    if record is None or record["seconds"] is None or not {*step.parts} <= {*record["parts"]}:
        return False
    return bool(record["whole"]) or record["limit"] >= step.seconds - 1.0


def format_verdict(step: Step, part: Mapping[str, Any], table: Sequence[str]) -> list[str]:
    """Return at most five lines about a step: what it took, what it found, which goals it met and
    missed, what failed, and what was left out.

    Args:
        part: What the step found (`select_part`), with `goals`.
        table: A line per row and kernel.
    """
    took, record = "not begun", part["steps"].get(step.name, {})
    if record.get("seconds") is not None:
        took = f"{record['seconds']:.0f} of {record['limit']:.0f} s"
    lines = [f"{step.name}: {took}{'' if record.get('whole') else ', not whole'}"]
    lines += ["  " + "; ".join(table)] if table else []
    judged = [goal for goal in part["goals"] if goal["measured"] is not None]
    if judged:
        lines.append("  " + "; ".join(_format_goals(judged)))
    if failures := list(list_failures(part)):
        lines.append("  failed: " + "; ".join(failures))
    if left := part["left_out_for_time"]:
        lines.append(f"  left out for time: {len(left)}: {', '.join(left)}")
    return [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines]


def _format_goals(goals: Sequence[dict[str, Any]]) -> Iterator[str]:
    by_outcome: dict[bool | None, list[str]] = {False: [], True: [], None: []}
    for goal in goals:
        text = f"{goal['name']} {goal['measured']:,.4g} of {goal['reach']:,g}"
        by_outcome[goal["met"]].append(text)
    words = {False: "missed", True: "met", None: "measured"}
    for outcome, texts in by_outcome.items():
        if texts:
            yield f"{words[outcome]}: {', '.join(texts)}"


def list_failures(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield in a few words what failed in a step. A refusal is no failure."""
    if "trouble" in part["smoke"]:
        yield f"smoke: {part['smoke']['trouble']}"
    for name, tests in part["tests"].items():
        if tests["outcome"] != "passed":
            yield f"tests of {name}: {tests['outcome']}, {tests.get('counts', '')}"
    for m in part["measurements"]:
        if m["trouble"] and m["details"] is not None:
            yield f"{m['kernel']} {m['implementation']}, {m['case']}: {m['trouble']}"
    for row in part["training"]:
        for name in ("ours", "plain"):
            trouble = row.get(name, {}).get("trouble", row.get(name, {}).get("incomplete"))
            if trouble:
                yield f"{row['row']} {name}: {trouble}"
    if "trouble" in (part["constants"] or {}):
        yield f"constants: {part['constants']['trouble']}"
