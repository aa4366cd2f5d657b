"""Work on the device that is no operator of the CPU: Triton kernels, and products of 16-bit
matrices with a result in fp32."""

import torch
import triton
from triton.runtime import interpreter

from fake_cuda.machine import count_as_work, repeat_in_graph

host = torch.ops.fake_cuda.host
_SHARED_MEMORY = 232_448
"""Bytes that a program may use on an H200."""


def as_one_kernel(name, reads, writes, call):
    """Call a function that reads and writes tensors of the device through `host`, as one kernel of
    the current stream."""

    def work():
        with torch.no_grad():
            call()

    work()
    count_as_work(name, map(host, reads), map(host, writes))
    repeat_in_graph(work, reads, writes)


_interpret = interpreter.InterpretedFunction.run


def _run(self, *arguments, grid, warmup, **options):
    """Interpret a kernel. Whatever changes is what it writes; the rest it may have read."""
    tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
    on_device = [x for x in tensors if x.is_cuda]
    if not on_device:
        return _interpret(self, *arguments, grid=grid, warmup=warmup, **options)
    if len(on_device) < len(tensors):
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    def on_host(x):
        return host(x.detach()) if isinstance(x, torch.Tensor) else x

    host_tensors = [on_host(x) for x in tensors]
    host_arguments = [on_host(x) for x in arguments]
    named = {name: on_host(x) for name, x in options.items()}

    def work():
        _interpret(self, *host_arguments, grid=grid, warmup=warmup, **named)

    before = [x.clone() for x in host_tensors]
    work()
    changed = [not _have_same_bytes(old, x) for old, x in zip(before, host_tensors, strict=True)]
    writes = [x for x, new in zip(host_tensors, changed, strict=True) if new]
    reads = [x for x, new in zip(host_tensors, changed, strict=True) if not new]
    count_as_work(self.fn.__name__, reads, writes)
    repeat_in_graph(work, host_tensors)


def _have_same_bytes(x, y):
    x, y = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (x, y))
    return torch.equal(x, y)


class _Driver:
    """Of Triton: describes the device."""

    class utils:
        @staticmethod
        def get_device_properties(index):
            return {"max_shared_mem": _SHARED_MEMORY}

    def get_current_device(self):
        return torch.cuda.current_device()

    def get_active_torch_device(self):
        return torch.device("cuda", self.get_current_device())


def _addmm(self, a, b, out_dtype, *, beta=1, alpha=1, out):
    """torch.addmm(..., out_dtype=torch.float32) of 16-bit matrices."""
    assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    assert out_dtype == torch.float32 == out.dtype == self.dtype

    def call():
        product = alpha * (host(a).float() @ host(b).float())
        host(out).copy_(product + beta * host(self) if beta else product)

    as_one_kernel("aten::addmm", [a, b, self] if beta else [a, b], [out], call)
    return out


def install():
    interpreter.InterpretedFunction.run = _run
    triton.runtime.driver.set_active(_Driver())
    implemented.impl("addmm.dtype_out", _addmm, "CUDA")


implemented = torch.library.Library("aten", "IMPL")
