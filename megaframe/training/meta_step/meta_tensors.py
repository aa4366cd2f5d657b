"""Hollow tensors: the shapes of a computation without its numbers, and a ledger of live bytes.

Floating-point tensors are on the meta device and have no content. Integer tensors of moderate size
are real, because they determine what goes where: tokens, routes, counts. Where integers would
follow from hollow numbers, as when a router chooses experts, the choices are distributed evenly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_REAL = (torch.int64, torch.int32, torch.bool)
"""Types whose tensors are real."""
_MOST = 1 << 26
"""Elements of the largest real tensor that is made; larger ones are hollow."""
_ATEN = torch.ops.aten
_CHOICES = (_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable)
_BY_INDEX = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default)


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are allocated while it is entered, on any device, until
    they are freed. Copies from a device to host memory do not count. live: bytes now. peak: the
    most since `mark`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def mark(self) -> None:
        """Restart the peak from the bytes that are live now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator by `run`, and count the storages that it allocated."""
        made = self.run(func, args, dict(kwargs or {}))
        away = _to_host(args, kwargs or {})
        for tensor in _tensors(made):
            self._enter(tensor, away)
        return made

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator itself."""
        return func(*args, **kwargs)

    def _enter(self, tensor: Tensor, away: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = 0 if away else storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class MetaTensorMode(AllocationTracker):
    """Runs operators on hollow tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Any, Any] = {}
        """Results of operators by their arguments, since blocks and microbatches repeat them."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator for real if no argument is hollow, else for the shapes only."""
        if not any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            return self._of_real(func, args, kwargs)
        made = None if func not in _MAKERS else self._like(func, args, kwargs)
        if made is not None:
            return made
        if func in _BY_INDEX:
            args = _index_positions(args)
        kept = [tensor for tensor in _tensors(args[:1]) if not tensor.is_meta]
        args, kwargs = _to_meta(args), _to_meta(kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        out = self._shaped(func, args, kwargs)
        if kept and _writes(func):
            return kept[0]  # hollow numbers cannot be written, so a real tensor keeps its own
        if func in _CHOICES:
            values, indices = out
            return values, _distribute_evenly(indices, args, func)
        return out

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator on hollow tensors. Torch derives many shapes in Python, which takes up
        to a millisecond, so it does this once for each kind of call; shapes that do not fit are
        found then."""
        fills = _fills(func)
        if not fills and not _makes(func):
            return func(*args, **kwargs)
        key = (func, _describe_argument(args), _describe_argument(kwargs))
        if key not in self._shapes:
            out = func(*args, **kwargs)
            if fills or all(_is_plain(tensor) for tensor in _tensors(out)):
                self._shapes[key] = None if fills else _map_tensors(out, _new_tensor)
            return out
        if fills:
            return args[0] if func._schema.returns else None
        return _map_tensors(self._shapes[key], _new_tensor)

    def _of_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if func in _FACTORIES:
            whole = _is_whole(func, args, dtype)
            kwargs["device"] = torch.device("cpu") if whole else _META
        elif func is _ATEN._to_copy.default and device == _META:
            kwargs["device"] = torch.device("cpu") if (dtype or args[0].dtype) in _REAL else _META
        elif func in _MAKERS and dtype is not None and dtype not in _REAL:
            kwargs["device"] = _META
        return func(*args, **kwargs)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a real integer tensor in the shape of a hollow one; None if it should be hollow."""
        dtype = kwargs.get("dtype") or args[0].dtype
        if dtype not in _REAL:
            return None
        return func(*args, **{**kwargs, "dtype": dtype, "device": torch.device("cpu")})


_RANGES = {_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step}
_FACTORIES = {
    *_RANGES,
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.zeros.default,
    _ATEN.ones.default,
    _ATEN.full.default,
    _ATEN.scalar_tensor.default,
    _ATEN.randint.default,
    _ATEN.randint.low,
    _ATEN.rand.default,
    _ATEN.randn.default,
    _ATEN.linspace.default,
}
_MAKERS = {
    _ATEN.new_empty.default,
    _ATEN.new_zeros.default,
    _ATEN.new_ones.default,
    _ATEN.new_full.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
    _ATEN.ones_like.default,
    _ATEN.full_like.default,
}


def _is_whole(func: Any, args: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Return whether a factory makes integers, few enough to be real."""
    if dtype is None:
        numbers = [n for n in args if isinstance(n, int | float)]
        ranges = func in _RANGES or func in (_ATEN.randint.default, _ATEN.randint.low)
        return ranges and all(isinstance(n, int) for n in numbers)
    sizes = next((a for a in args if isinstance(a, list | tuple)), ())
    elements = 1
    for size in sizes:
        elements *= size
    return dtype in _REAL and elements <= _MOST


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def _map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(item, change) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(item, change) for key, item in tree.items()}
    return tree


@cache
def _writes(func: Any) -> bool:
    """Return whether an operator writes into its first argument."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


@cache
def _fills(func: Any) -> bool:
    """Return whether an operator of torch writes into its first argument, keeps its shape, and
    returns no other tensor."""
    in_place = func.namespace == "aten" and _writes(func) and len(func._schema.returns) < 2
    return in_place and torch.Tag.inplace_view not in func.tags


@cache
def _makes(func: Any) -> bool:
    """Return whether an operator of torch returns only new tensors and writes into none."""
    schema = func._schema
    return func.namespace == "aten" and not any(
        one.alias_info is not None for one in (*schema.arguments, *schema.returns)
    )


def _describe_argument(given: Any) -> Any:
    """Return what the shapes of results depend on in an argument. 1 and 1.0 count as equal, because
    operators accept both as floats."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, list | tuple):
        return tuple(map(_describe_argument, given))
    if isinstance(given, dict):
        return tuple((name, _describe_argument(value)) for name, value in given.items())
    return given


def _new_tensor(tensor: Tensor) -> Tensor:
    """Return a new hollow tensor of the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether `_new_tensor` of a hollow tensor has a storage of the same size."""
    return tensor.untyped_storage().nbytes() == _new_tensor(tensor).untyped_storage().nbytes()


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator copies something from a device to host memory."""
    device = kwargs.get("device")
    away = device is not None and device.type == "cpu"
    return away and any(tensor.device.type != "cpu" for tensor in _tensors(args))


def _to_meta(tree: Any) -> Any:
    """Return the tree with every tensor replaced by a hollow one."""
    return _map_tensors(tree, lambda one: one if one.is_meta else _new_tensor(one))


def _index_positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an indexing operator, with real masks replaced by the indices where
    they are true."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype is torch.bool and not index.is_meta:
            indices.extend(index.nonzero(as_tuple=True))
        else:
            indices.append(index)
    return args[0], indices, *args[2:]


def _distribute_evenly(indices: Tensor, args: Sequence[Any], func: Any) -> Tensor:
    """Return the indices of a hollow topk or sort along the last dim.

    For topk, consecutive rows choose shifted indices, so that all are chosen equally often, and the
    choices of a row are as far apart as possible. For sort, they are 0, 1, 2, ... in each row.
    """
    rows, choices, size = indices.numel() // max(1, indices.shape[-1]), indices.shape[-1], 0
    size = args[0].shape[-1]
    if func is not _ATEN.topk.default:
        return torch.arange(size).expand(indices.shape).contiguous()
    apart = max(1, size // max(1, choices))
    places = torch.arange(rows)[:, None] + apart * torch.arange(choices)[None, :]
    return (places % size).view(indices.shape)
