"""A stand-in for CUDA devices, so that the GPU's path through megaframe runs where there is no GPU.

Its devices have the host's memory, and all work runs at once, in the CPU's operators; but tensors
are on `cuda:0`, and every stream, event, pinned copy, capture and collective is followed by vector
clocks (`clocks.h`). They find what real streams would leave to chance:

race      memory is used by two streams, or by a stream and the host, without an order
lifetime  memory is freed while another stream may use it
memory    an operator uses memory that is not allocated, or no longer
event     a stream waits for an event that nobody has recorded
capture   what a CUDA graph cannot hold: a wait of the host, an event or a stream from outside
wait      the host waits for the device: slow, but not wrong

Tensors on different devices, and tensors of the host given to a kernel, raise as they do on a GPU.
What a copy brings to pinned memory is hidden from the host until the host knows that it is there,
and memory that nothing has written is NaN.

It cannot show speed, concurrency, reuse of memory by CUDA's allocators, or anything about the code
of others: cuDNN's, cuBLAS's, flash attention's, CUDA's graphs, NCCL. Triton kernels run in Triton's
interpreter and collectives over gloo, both on the device's memory and in the order of its streams.
Where NCCL makes ranks wait for each other is modelled apart from that (`nccl_rules.py`), also for
ranks that run alone and without these devices (`recorder.py`).

    build.py            compiles the C++ part, where it can
    stubs.py, stubs.h   make a build of torch with CUDA one without
    clocks.h            vector clocks, memory, captures: what is reported
    device.h            memory, streams and events, as torch's C++ part asks for them
    dispatch.h          operators
    fake_cuda.cpp       the functions that Python calls
    machine.py          the same as Python calls of that library, and what it reports
    cuda.py             torch.cuda on top of it
    fake_kernels.py     Triton's kernels, and an operator that only GPUs have
    collectives.py      NCCL's process groups
    aborts.py           how they fail and end
    fake_failures.py    programs in which they do
    flight_records.py   what NCCL's groups write down about their transfers
    nccl_rules.py       NCCL's and CUDA's rules, for the recorded calls of all ranks
    recorder.py         the calls of a rank that runs alone
    nccl_layouts.py     layouts of every kind to record
    programs.py         programs, right and wrong, for its tests
    fake_server.py      runs programs on the ranks of a stand-in
    client.py           asks it to, and reads what was reported
"""
