"""Parses foreign pickles as data, without executing them.

A pickle is a program whose instructions import and call whatever they name. Only the few
instructions that metadata and tensors need are interpreted here. A class or function stays a name,
a call becomes a record of name and arguments, and a name that is not expected is an error.

torch's loader with `weights_only` is safe too, but has no limit: 4 MB of empty lists take 275 MB
there before it ends (torch 2.13), and it calls the classes that it knows.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

MAX_INSTRUCTIONS = 8_000_000
"""Most instructions of a pickle. This limits the memory that its contents need; the size of the
pickle alone would not."""


@dataclass(frozen=True)
class GlobalName:
    """The name of a class or function that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class PickledCall:
    """A call that a pickle would make, of a function or class, and the state that it would set on
    the result."""

    function: GlobalName
    arguments: tuple[Any, ...]
    state: Any = None


PERSISTENT_ID = GlobalName("", "persistent")
"""The name in the record of a persistent id, which refers to an object outside of the pickle. The
id is the record's only argument."""


def parse_pickle(data: bytes, expected: Collection[GlobalName]) -> Any:
    """Return the contents of a pickle as plain values, `GlobalName`s and `PickledCall`s.

    Nothing that the pickle names is imported, called or compared.

    Raises:
        ValueError: If `data` is not a pickle, has instructions that are not supported, or has a
            name that is not in `expected`.
    """
    machine = _PickleParser(expected)
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(data)):
            if count == MAX_INSTRUCTIONS:
                raise ValueError(f"it has more than {MAX_INSTRUCTIONS:,} instructions")
            if code.name == "STOP":
                return machine.pop()
            machine.execute(code.name, argument)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is not a pickle: {type(error).__name__}") from None
    raise ValueError("it is not a pickle: it has no end")


class _StackMark:
    """Marks where the items of a tuple, list or dict begin on the stack."""


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_GETS = {"BINGET", "LONG_BINGET"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_IGNORED = {"PROTO", "FRAME"}


@dataclass
class _PickleParser:
    expected: Collection[GlobalName]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def execute(self, code: str, argument: Any) -> None:
        """Execute one instruction, or raise ValueError if it is not allowed."""
        if code in _VALUES:
            self.stack.append(argument)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _GETS:
            self.stack.append(self.memo[argument])
        elif code in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif code in _HANDLERS:
            _HANDLERS[code](self, argument)
        elif code not in _IGNORED:
            raise ValueError(f"it has the instruction {code}, which is not allowed")

    def pop(self) -> Any:
        """Remove the value at the top of the stack and return it."""
        value = self.stack.pop()
        if value is _StackMark:
            raise ValueError("it is not a pickle: a mark in place of a value")
        return value

    def _pop_to_mark(self) -> list[Any]:
        position = len(self.stack) - 1
        while self.stack[position] is not _StackMark:
            position -= 1
            if position < 0:
                raise ValueError("it is not a pickle: a mark is missing")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def _build_tuple(self, size: int) -> None:
        items = [self.pop() for _ in range(size)]
        self.stack.append(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it is not a pickle: something is added to what is not a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it is not a pickle: something is put into what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys, such as tuples, are hashed by their contents, which may be nested deeply.
            if not isinstance(key, str | int | PickledCall):
                raise ValueError("it has keys that are neither text nor records")
            target[key] = value

    def _push_global(self, module: Any, name: Any) -> None:
        global_name = GlobalName(str(module), str(name))
        if global_name not in self.expected:
            raise ValueError(f"it names {str(global_name)[:80]!r}, which is not allowed")
        self.stack.append(global_name)

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("it names something that is not text")
        self._push_global(module, name)

    def _call(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, GlobalName) or type(arguments) is not tuple:
            raise ValueError("it calls what has no name")
        self.stack.append(PickledCall(function, arguments))

    def _build(self, _: Any) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, PickledCall) or target.state is not None:
            raise ValueError("it gives a state to what has none")
        target.state = state


_HANDLERS: dict[str, Callable[[_PickleParser, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_StackMark),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.stack[-1]}),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine._pop_to_mark())),
    "TUPLE1": lambda machine, _: machine._build_tuple(1),
    "TUPLE2": lambda machine, _: machine._build_tuple(2),
    "TUPLE3": lambda machine, _: machine._build_tuple(3),
    "APPEND": lambda machine, _: machine._append([machine.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._pop_to_mark()),
    "SETITEM": lambda machine, _: machine._set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._set_items(machine._pop_to_mark()),
    "GLOBAL": lambda machine, argument: machine._push_global(*argument.split(" ", 1)),
    "STACK_GLOBAL": _PickleParser._stack_global,
    "REDUCE": _PickleParser._call,
    "NEWOBJ": _PickleParser._call,
    "BUILD": _PickleParser._build,
    "BINPERSID": lambda machine, _: machine.stack.append(
        PickledCall(PERSISTENT_ID, (machine.pop(),))
    ),
}
