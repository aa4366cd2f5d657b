"""Every comparison of two runs bit by bit says what makes them equal: all go through
`tests/support/bitwise.py`, whose functions ask for it.
"""

import ast
from inspect import isfunction, signature
from pathlib import Path

import bitwise
import pytest
from bitwise import RunLosses, assert_same_losses

TESTS = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "bitwise.py")
COMPARISONS = {
    name
    for name, function in vars(bitwise).items()
    if isfunction(function) and "because" in signature(function).parameters
}
STARTERS = {"pool", "make_trainer", "Trainer", "RankPool", "fake_gpu"}
"""Names of what starts runs."""


def find_reasons(tree):
    """Yield (call, what it gives as its reason) for each comparison; None if that is no text."""
    texts = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in COMPARISONS:
            (reason,) = [word.value for word in node.keywords if word.arg == "because"] or [None]
            if isinstance(reason, ast.Name):
                reason = texts.get(reason.id)
            is_text = isinstance(reason, ast.JoinedStr) or isinstance(
                getattr(reason, "value", None), str
            )
            yield node, ast.unparse(reason) if is_text else None


def find_other_comparisons(tree):
    """Yield the nodes that compare results of runs in another way: tensors by `torch.equal`, bytes
    of files, results by their names, and losses that are not read by `read_losses`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "equal":
            if ast.unparse(node) == "torch.equal":
                yield node
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            if not isinstance(node.left, ast.Attribute | ast.Call):
                continue
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            names = ("read_bytes()", ".losses", ".norms", ".grad_norm")
            if any(all(side.endswith(name) for side in sides) for name in names):
                yield node
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
            values = [node.value if isinstance(node, ast.DictComp) else node.elt]
            values = [value for value in values if isinstance(value, ast.Subscript)]
            if any(ast.unparse(value).endswith("['loss']") for value in values):
                yield node


def find_functions_with_runs(path, tree):
    """Yield what compares runs: all of a file that is about runs, or its functions that start
    some."""
    if path.relative_to(TESTS).parts[0] in ("parity", "end_to_end"):
        yield tree
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            if STARTERS & {*names, *(argument.arg for argument in node.args.args)}:
                yield node


def test_runs_are_compared_bitwise_only_with_a_reason():
    comparisons, wrong = [], []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in {*COMPARISONS, *STARTERS}):
            continue  # parsing takes long, and only these compare or start runs
        tree = ast.parse(text)
        reasons = [*find_reasons(tree)]
        comparisons += reasons
        for part in find_functions_with_runs(path, tree):
            nodes = {*find_other_comparisons(part)}
            wrong += [f"{path}:{node.lineno}: {ast.unparse(node)}" for node in nodes]
        wrong += [f"{path}:{node.lineno}: why?" for node, why in reasons if not why]
    assert not wrong, "\n".join(wrong)
    assert len(comparisons) > 40


def test_a_comparison_without_a_reason_is_seen():
    code = """
assert read_losses(a) == read_losses(b)
assert torch.equal(a, b)
assert all(map(torch.equal, a, b))
assert a.read_bytes() == b.read_bytes()
assert a.losses == b.losses
losses = [line["loss"] for line in lines]
assert_same_bits(a, b, because=why)
"""
    tree = ast.parse(code)
    assert len([*find_other_comparisons(tree)]) == 5
    assert [reason for _, reason in find_reasons(tree)] == [None]
    config = {section: {} for section in ("model", "train", "optim", "data", "kernels")}
    auto, decided = ({**config, "parallel": {"bucket_size": size}} for size in ("auto", 6144))
    with pytest.raises(TypeError, match="because"):
        assert RunLosses([1.0], decided) == RunLosses([1.0], decided)
    assert_same_losses(RunLosses([1.0], decided), RunLosses([1.0], decided), because="of this")
    with pytest.raises(AssertionError, match=r"parallel\.bucket_size"):
        assert_same_losses(RunLosses([1.0], decided), RunLosses([1.0], auto), because="of this")
    with pytest.raises(AssertionError, match="although of this"):
        assert_same_losses(RunLosses([1.0], auto), RunLosses([2.0], auto), because="of this")
