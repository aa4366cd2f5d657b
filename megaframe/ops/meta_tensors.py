"""Meta tensors: the shapes of a computation without its numbers, and a count of live bytes.

Floating-point tensors are on the meta device and have no content. Integer tensors of moderate size
are real, because they determine what goes where: tokens, routes, counts. Where integers would
depend on numbers without content, as when a router chooses experts, the choices are distributed
evenly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megaframe.ops.operator_mode import OperatorMode

_META = torch.device("meta")
_REAL = (torch.int64, torch.int32, torch.bool)
"""Types whose tensors are real."""
_MOST = 1 << 26
"""Elements of the largest real tensor that is made; larger ones are meta tensors."""
_MOST_SHAPES = 1 << 16
_shapes: dict[Any, Any] = {}
"""Results of operators by their arguments: blocks, microbatches and measurements repeat them."""
_ATEN = torch.ops.aten
_CHOICES = (_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable)
_BY_INDEX = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default)


class AllocationTracker(OperatorMode):
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
        result = self.run(func, args, dict(kwargs or {}))
        to_host = _to_host(args, kwargs or {})
        for tensor in _iterate_tensors(result):
            self._enter(tensor, to_host)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator itself."""
        return func(*args, **kwargs)

    def _enter(self, tensor: Tensor, to_host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = 0 if to_host else storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class MetaTensorMode(AllocationTracker):
    """Runs operators on meta tensors."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator for real if no argument is a meta tensor, else for the shapes only."""
        if not any(tensor.is_meta for tensor in _iterate_tensors((args, kwargs))):
            return self._run_on_real(func, args, kwargs)
        result = None if func not in _MAKERS else self._make_real_like(func, args, kwargs)
        if result is not None:
            return result
        if func in _BY_INDEX:
            args = _index_positions(args)
        real = [tensor for tensor in _iterate_tensors(args[:1]) if not tensor.is_meta]
        args, kwargs = _to_meta(args), _to_meta(kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        out = self._compute_shapes(func, args, kwargs)
        if real and _is_writing(func):
            return real[0]  # a meta tensor has no numbers to write, so a real tensor keeps its own
        if func in _CHOICES:
            values, indices = out
            return values, _distribute_evenly(indices, args, func)
        return out

    def _compute_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator on meta tensors. Torch derives many shapes in Python, which takes up
        to a millisecond, so it does this once for each kind of call; shapes that do not fit are
        found then."""
        is_filling = _is_filling(func)
        if not is_filling and not _is_allocating(func):
            return func(*args, **kwargs)
        key = (func, _describe_argument(args), _describe_argument(kwargs))
        if key not in _shapes:
            out = func(*args, **kwargs)
            if is_filling or all(_is_plain(tensor) for tensor in _iterate_tensors(out)):
                if len(_shapes) >= _MOST_SHAPES:
                    _shapes.clear()
                _shapes[key] = None if is_filling else _map_tensors(out, _make_meta_tensor)
            return out
        if is_filling:
            return args[0] if func._schema.returns else None
        return _map_tensors(_shapes[key], _make_meta_tensor)

    def _run_on_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if func in _FACTORIES:
            is_real = _is_small_integer(func, args, dtype)
            kwargs["device"] = torch.device("cpu") if is_real else _META
        elif func is _ATEN._to_copy.default and device == _META:
            kwargs["device"] = torch.device("cpu") if (dtype or args[0].dtype) in _REAL else _META
        elif func in _MAKERS and dtype is not None and dtype not in _REAL:
            kwargs["device"] = _META
        return func(*args, **kwargs)

    def _make_real_like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a real integer tensor in the shape of a meta tensor; None if it should be one."""
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


def _is_small_integer(func: Any, args: Sequence[Any], dtype: torch.dtype | None) -> bool:
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


def _iterate_tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _iterate_tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _iterate_tensors(item)


def _map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(item, change) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(item, change) for key, item in tree.items()}
    return tree


@cache
def _is_writing(func: Any) -> bool:
    """Return whether an operator writes into its first argument."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


@cache
def _is_filling(func: Any) -> bool:
    """Return whether an operator of torch writes into its first argument, keeps its shape, and
    returns no other tensor."""
    in_place = func.namespace == "aten" and _is_writing(func) and len(func._schema.returns) < 2
    return in_place and torch.Tag.inplace_view not in func.tags


@cache
def _is_allocating(func: Any) -> bool:
    """Return whether an operator of torch returns only new tensors and writes into none."""
    schema = func._schema
    return func.namespace == "aten" and not any(
        value.alias_info is not None for value in (*schema.arguments, *schema.returns)
    )


def _describe_argument(argument: Any) -> Any:
    """Return what the shapes of results depend on in an argument. 1 and 1.0 count as equal, because
    operators accept both as floats."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_describe_argument, argument))
    if isinstance(argument, dict):
        return tuple((name, _describe_argument(value)) for name, value in argument.items())
    return argument


def _make_meta_tensor(tensor: Tensor) -> Tensor:
    """Return a new meta tensor of the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether `_make_meta_tensor` of a meta tensor has a storage of the same size."""
    return tensor.untyped_storage().nbytes() == _make_meta_tensor(tensor).untyped_storage().nbytes()


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator copies something from a device to host memory."""
    device = kwargs.get("device")
    to_host = device is not None and device.type == "cpu"
    return to_host and any(tensor.device.type != "cpu" for tensor in _iterate_tensors(args))


def _to_meta(tree: Any) -> Any:
    """Return the tree with every tensor replaced by a meta tensor."""
    return _map_tensors(tree, lambda x: x if x.is_meta else _make_meta_tensor(x))


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
    """Return the indices of a topk or sort along the last dim.

    For topk, consecutive rows choose shifted indices, so that all are chosen equally often, and the
    choices of a row are as far apart as possible. For sort, they are 0, 1, 2, ... in each row.
    """
    rows, choices, size = indices.numel() // max(1, indices.shape[-1]), indices.shape[-1], 0
    size = args[0].shape[-1]
    if func is not _ATEN.topk.default:
        return torch.arange(size).expand(indices.shape).contiguous()
    distance = max(1, size // max(1, choices))
    places = torch.arange(rows)[:, None] + distance * torch.arange(choices)[None, :]
    return (places % size).view(indices.shape)
