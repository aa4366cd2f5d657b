"""Triton's interpreter in less than half its time, and closer to a chip.

It spends most of it on work that never changes: inside a kernel, every call of a device function
replaces the whole language by interpreted functions once more, every operation builds the table of
NumPy's types, and every value describes its shape anew. Here each is done once. Sums and products
of integers are still checked for overflow, by NumPy instead of a dozen interpreted operations.

Only conversions from fp32 to bf16 have other results: chips round to nearest, and the interpreter
would truncate.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_TO_ZERO = ir.ROUNDING_MODE.RTZ
_NAN = 0x7FC0


def patch_interpreter() -> None:
    """Let the interpreter of this process reuse what it has already worked out, and round."""
    _replace_language_once_per_launch()
    _look_types_up()
    _describe_shapes_once()
    _check_overflow_with_numpy()
    _round_to_nearest()
    _index_with_arrays()


def _replace_language_once_per_launch() -> None:
    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    replaced: set[frozenset[str]] = set()

    @functools.cache
    def find_languages(function: Any) -> frozenset[str]:
        # The names by which this function's module knows the language: a replacement patches those.
        global_values = function.__globals__.values()
        return frozenset(
            x.__name__ for x in global_values if inspect.ismodule(x) and x in (tl, tl.core)
        )

    def replace_once(function: Any) -> Any:
        """A launch comes first, with nothing replaced, and needs the scope to restore it all."""
        if find_languages(function) in replaced:
            return None
        # Remembered until the launch ends: device functions called inside need no second one.
        replaced.add(find_languages(function))
        return replace(function)

    def restore_all(scope: Any) -> None:
        replaced.clear()
        restore(scope)

    interpreter._patch_lang = replace_once
    interpreter._LangPatchScope.restore = restore_all


def _look_types_up() -> None:
    find = interpreter._get_np_dtype
    found_types: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found_types:
            found_types[scalar.name] = find(scalar)
        return found_types[scalar.name]

    interpreter._get_np_dtype = look_up


def _describe_shapes_once() -> None:
    describe = tl.block_type.__init__
    descriptions: dict[tuple[Any, ...], dict[str, Any]] = {}

    def describe_once(self: tl.block_type, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in descriptions:
            describe(self, element_ty, shape)
            descriptions[key] = {**vars(self)}
        # The description is shared; the element type keeps its own identity.
        vars(self).update(descriptions[key], element_ty=element_ty)

    tl.block_type.__init__ = describe_once


def _check_overflow_with_numpy() -> None:
    def check(_: Any, left: Any, right: Any, operation: Any) -> None:
        kind, name = left.type.scalar, operation.__name__
        if kind.int_bitwidth < 64:
            # In int64, where the sum or product of narrower integers cannot overflow unseen.
            result = getattr(operator, name)(
                *(x.handle.data.astype("int64") for x in (left, right))
            )
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            inside = low <= result.min(initial=high) and result.max(initial=low) <= high
            assert inside, f"int{kind.int_bitwidth} overflow in {name}"

    # Of the class: Triton before 3.7 makes an object of it for every function that it interprets.
    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _round_to_nearest() -> None:
    convert = interpreter._convert_float

    def round_or_convert(x: Any, kind: Any, target: Any, mode: Any) -> Any:
        if (kind, target) == (tl.bfloat16, tl.float32):
            # bf16 is the upper half of fp32.
            return x.astype("uint32") << 16
        if (kind, target) == (tl.float32, tl.bfloat16) and mode != _TO_ZERO:
            bits = x.view("uint32")
            # To nearest, ties to even: half a last place less one bit, plus the last bit that
            # stays.
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            # The addition could carry a NaN over to infinity or zero.
            rounded[x != x] = _NAN
            return rounded.astype("uint16")
        return convert(x, kind, target, mode)

    interpreter._convert_float = round_or_convert


def _index_with_arrays() -> None:
    """Triton before 3.7 makes a loop's bound an int as NumPy from 2.5 on refuses to: every value
    of the interpreter is an array of one dimension, also a scalar."""
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
