"""Every key of a run, typed, with its documentation: the contract between a user and megaframe.

Sections are frozen; the docstring under a field is what `--explain section.key` prints. Checks that
concern one section live here; checks that need several (divisibility, layout) live in `check.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.model import Model
from megaframe.config.section import Fraction, NonNegative, Positive, Section


class Run(Section):
    dir: str = "runs/default"
    """Folder of the run: resolved config, metrics and checkpoints are written into it."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1234
    """Seed of initial weights, data order and dropout. The same seed gives the same run."""
    deterministic: bool = False
    """Use deterministic algorithms only, so that two runs are bitwise equal on a GPU too."""
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    """Where to train: `auto` takes a GPU for each rank when there are GPUs. `shared`: all ranks of
    a machine compute on its first GPU, or on the CPU where there is none, and exchange through the
    host's memory, by the calls of GPUs: slow, for trying layouts."""


class Parallel(Section):
    auto: bool = False
    """Let the planner choose the layout for the ranks at hand: all of `tensor` to `schedule` here
    that is not given, `train.microbatch` and `train.recompute`. A resumed run keeps what it began
    with."""
    cluster: str | None = None
    """Description of the machine that a plan is made for: one of `configs/clusters`, or a path.
    Default: by device; for tools/plan.py h100-ib."""
    tensor: Positive = 1
    """Ranks that split each matrix (and, outside the matrices, the sequence)."""
    tensor_chunks: Positive = 1
    """Parts in which rows travel between tensor ranks: the product of one part is made while the
    next is gathered, or the one before summed."""
    symmetric_memory: Literal["auto", "off"] = "off"
    """`auto` leaves transfers beside forward products to PyTorch's fused operators on NVIDIA GPUs
    of one node that have them, in place of `tensor_chunks`. Not yet run on such a machine."""
    context: Positive = 1
    """Ranks that divide each sample."""
    context_kind: Literal["ring", "all_to_all", "nested"] = "ring"
    """How attention sees tokens of other context ranks: `ring` passes keys and values round,
    `all_to_all` exchanges heads for tokens, `nested` does this among neighbours and the former
    between them."""
    context_heads: Positive | None = None
    """nested: neighbours that exchange heads for tokens; divides `context`."""
    pipeline: Positive = 1
    """Ranks that split the layers into stages."""
    chunks: Positive = 1
    """Stages per pipeline rank (virtual pipeline)."""
    data: Positive | None = None
    """Ranks that split the batch. Default: what remains of the world."""
    data_replicate: Positive = 1
    """Replicas of a shard group (hybrid sharding); divides `data`."""
    expert: Positive = 1
    """Ranks that split the experts."""
    expert_tensor: Positive = 1
    """Ranks that split each expert's matrices."""
    dispatch: Literal["all_to_all", "all_gather", "hierarchical", "deduplicated"] = "all_to_all"
    """How tokens reach their experts: `all_to_all` directly; `all_gather` every token to all ranks
    of the expert axis, for few of them; `hierarchical` within a node first and then across, in
    fewer and larger messages; `deduplicated` once to each node, and from there on."""
    expert_overlap: bool = False
    """Run a forward and the backward behind it in the schedule by turns, one computing while the
    tokens of the other travel. Such pairs are in interleaved and V-shaped schedules."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What data ranks shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    reduce_precision: Literal["master", "bf16"] = "master"
    """How gradients travel to be summed: as they are, or as bf16, half the bytes, with sums in
    master precision; `zero=0` then sends bf16 sums back."""
    compress: Literal["none", "int8", "topk", "powersgd"] = "none"
    """How gradients of matrices travel between replicas, or where there is one between all data
    ranks: `int8` by blocks, `topk` the largest, `powersgd` low-rank factors; what is left out is
    added to the next step's."""
    compress_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk: share of the elements that is sent."""
    compress_rank: Positive = 4
    """powersgd: columns of the factors."""
    node_size: Positive | None = None
    """Ranks that share a node; tensor ranks on several nodes are warned of. Default: as many as the
    launcher starts on this one."""
    schedule: str = "1f1b"
    """Order of forward and backward passes: gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2,
    zb-v, v-half, dualpipe-v, search (the best order found for the work of the stages), or
    file:PATH. `tools/schedule.py` draws them."""
    schedule_group: Positive | None = None
    """interleaved: microbatches that a chunk runs in a row. Default: `pipeline`."""
    schedule_memory: Annotated[float, Field(ge=1)] | None = None
    """search: most live activations of a rank, in units of all its layers. Default: `pipeline`, as
    many as 1f1b keeps on the first rank."""
    layers_per_stage: tuple[NonNegative, ...] | None = None
    """Layers of each stage, in order. Default: divided by work, the head counted."""
    serial: bool = False
    """Run communication in line with compute. Never changes a bit of the result; for debugging."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a collective that does not finish ends the run with an error."""


class BatchRamp(Section):
    start: Positive
    """Global batch of the first step, in samples; a multiple of `increment`."""
    increment: Positive
    """Samples by which the global batch grows each time."""
    samples: Positive
    """Samples over which it grows, in equal parts, from `start` to `train.global_batch`."""


class Train(Section):
    steps: Positive = 1000
    """Optimizer steps of the whole run."""
    seq: Positive = 1024
    """Tokens per sample."""
    global_batch: Positive = 8
    """Samples per optimizer step over all ranks."""
    microbatch: Positive = 1
    """Samples per forward pass on one rank."""
    batch_ramp: BatchRamp | None = None
    """Start with a smaller global batch and grow it."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    """Type of the matrix products. bf16 and fp16 keep fp32 weights and gradients beside it."""
    fp8: Literal["none", "tensor", "row", "block"] = "none"
    """Multiply in 8 bits in the linears and experts of blocks, with bf16 around it: one scale for a
    tensor, for each row, or for each 128 along what is summed over. On a CPU it is emulated."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: `selective` norms and activations (about
    3% of a step for a third of the activations), `full` each block from its input."""
    recompute_blocks: NonNegative | tuple[NonNegative, ...] | Literal["auto"] = 0
    """Blocks at the start of each stage (one number, or one per stage) that are computed again from
    their input whatever `recompute` says. `auto`: as few of each stage as fit into the memory of
    the chip (`parallel.cluster`), by the plan."""
    offload: bool = False
    """Keep the inputs of blocks that run again in host memory until then; on a CPU they are there
    anyway."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile what lies between products and transfers (norms, activations, rotation, sums) with
    this backend of torch.compile, where `kernels` names nothing for it. aot_eager only tries it."""
    cuda_graph: bool = False
    """Start all passes of a step with one call: one GPU, no experts, no dropout, as many valid
    tokens in each step. Says where a step has to do without."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target probability that is spread over the vocabulary."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-partition penalty per token (PaLM uses 1e-4)."""
    mtp_weight: Annotated[float, Field(ge=0)] = 0.3
    """Weight in training of the mean loss of the tokens that `model.mtp_depth` adds, summed over
    valid ones and divided by the valid tokens of the batch, as the loss is."""
    eval_every: NonNegative = 0
    """Evaluate on the validation split every so many steps; 0 never."""
    eval_samples: Positive = 64
    """Samples of the validation split per evaluation; the same ones each time."""


class Kernels(Section):
    elementwise: Literal["auto", "triton", "torch", "liger", "reference"] = "auto"
    """LayerNorm and RMSNorm, activations of the MLP, rotation of queries and keys. Here as in all
    keys of this section: `auto` is the fastest known on this GPU that takes what it is given, on a
    CPU plain torch code; `reference` that code everywhere; any other name runs or is an error."""
    attention: Literal[
        "auto", "triton", "torch", "torch-flash", "cudnn", "flash-attn", "reference"
    ] = "auto"
    """Attention. With a ring of context ranks the one that gives log-sum-exps: triton."""
    loss: Literal["auto", "triton", "reference"] = "auto"
    """Cross-entropy of a chunk of logits, which become their gradient where they lie."""
    update: Literal["auto", "triton", "torch", "apex", "reference"] = "auto"
    """AdamW over a flat span, and sums of squares for the gradient norm: of buckets, where plain
    code has each parameter's."""
    experts: Literal["auto", "triton", "torch", "cuda", "reference"] = "auto"
    """The router, where there are no groups of experts; the order of tokens by expert and their way
    there and back, where one rank has all experts and none is limited, so that nothing waits for
    the host; products of all experts at once."""
    fp8: Literal["auto", "triton", "torch", "reference"] = "auto"
    """Rounding to 8 bits and products of such matrices, for `train.fp8`."""


class ParameterGroup(Section):
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the learning rate of these parameters."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay. Default: `optim.weight_decay`, for vectors 0."""


class ParameterGroups(Section):
    matrix: ParameterGroup = ParameterGroup()
    """Weights of the linears in the blocks."""
    embedding: ParameterGroup = ParameterGroup()
    """Tables of tokens and positions; a tied head is one of them."""
    head: ParameterGroup = ParameterGroup()
    """The output head, where it is not tied."""
    vector: ParameterGroup = ParameterGroup()
    """Gains and biases."""


class Optim(Section):
    name: Literal["adamw", "muon", "lion", "sgd"] = "adamw"
    """Optimizer. `muon` orthogonalises the updates of matrices, and is AdamW for all else."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"] = "cosine"
    """Learning rate after warm-up. `wsd` stays at `lr` and falls linearly at the end."""
    warmup: NonNegative = 0
    """Steps of linear warm-up from 0."""
    decay: Positive | None = None
    """cosine, linear: step at which `min_lr` is reached (default: train.steps). wsd: number of
    steps of the final fall (default: a fifth of train.steps)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """adamw: decay of the running mean of gradients. lion: share of that mean in the direction."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default_factory=lambda given: 0.99 if given["name"] == "lion" else 0.95
    )
    """adamw: decay of the running mean of squared gradients. lion: of that of gradients. Default:
    0.99 for lion, else 0.95."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """adamw: added to the root of the squared-gradient mean."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """muon, sgd: what is left of the sum of gradients after a step. Default: 0.95 for muon, 0.9 for
    sgd."""
    nesterov: bool | None = None
    """muon, sgd: look one step of momentum ahead. Default: true for muon, false for sgd."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices and embeddings, decoupled from the gradient under every optimizer;
    norms and biases have none."""
    groups: ParameterGroups = ParameterGroups()
    """Learning rates and weight decays by what the model does with a parameter."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained; `*` stands for anything, as in `blocks.0.*`."""
    state: Literal["master", "bf16", "int8"] = "master"
    """Type of the optimizer's running averages: that of the master weights, or fewer bits, which
    are rounded up or down by chance so that averages stay true."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, kept beside them and saved with them:
    `tools/generate.py --ema` uses it."""
    offload: bool = False
    """Keep the optimizer's state in host memory, under bf16 and fp16 master weights as well, and
    bring them a part at a time, under every optimizer; on a CPU they are there anyway."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 clips nothing."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """fp16: loss scale at the start; halved on overflow."""
    loss_scale_window: Positive = 1000
    """fp16: steps without overflow after which the loss scale doubles."""


class Source(Section):
    path: str
    """Token files without their suffix: PATH.bin and PATH.idx."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples that come from this source, relative to the others."""


class Data(Section):
    sources: tuple[Source, ...] = ()
    """Token files and their weights in the blend."""
    split: tuple[Fraction, Fraction, Fraction] = (0.98, 0.02, 0.0)
    """Shares of each source's documents for training, validation and test, in this order."""
    tokenizer: str | None = None
    """KIND:PATH with KIND sentencepiece, hf or tiktoken, or just `bytes`."""
    reset_positions: bool = False
    """Count positions from 0 again at the start of each document inside a sample."""
    reset_attention: bool = False
    """Keep attention inside each document of a sample."""
    mask_eod: bool = False
    """Give no loss to the token after an end of document (the first of an unrelated text)."""
    prefetch: NonNegative = 2
    """Batches that a background thread reads ahead."""


class Checkpoint(Section):
    every: NonNegative = 1000
    """Save every so many steps and at the end; 0 never saves."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    keep_every: NonNegative = 0
    """Keep the checkpoints of steps that are multiples of this for good; 0: of none."""
    read_back: bool = True
    """Check what the disk or the store gives back of a checkpoint before older ones are deleted.
    Without it the disk has half as much to do, and a fault of it is found when the checkpoint is
    loaded."""
    folder: str | None = None
    """Where checkpoints lie: a path, or the URL of a store such as s3://bucket/run, of this run
    alone. Default: `checkpoints` in the run's folder."""
    memory_every: NonNegative = 0
    """Copy every rank's part into the memory of its node, and of another one, every so many steps;
    where these copies are newer than what is saved `resume=latest` continues from them. 0 never."""
    memory_dir: str = "/dev/shm"
    """memory_every: a folder that lies in a node's memory; it must have room for two copies of the
    parts of twice the node's ranks."""
    resume: str | None = None
    """`latest` continues from the newest checkpoint in `folder` (a fresh start where there is none
    yet); the path or URL of a checkpoint continues from that."""
    weights: str | None = None
    """Path or URL of a checkpoint whose weights a new run starts with. Where the run has experts
    and the checkpoint has none, each starts as a copy of its layer's MLP, or of a part of it."""


class Meter(Section):
    every: Positive = 1
    """Steps between two lines on the console; metrics.jsonl has every step."""
    experts_every: NonNegative = 100
    """Steps between two lines of metrics.jsonl that also have the tokens of every expert; 0: none
    has them."""
    ranks_every: NonNegative = 100
    """Steps between two lines of metrics.jsonl that also have the split of the step on every rank;
    0: none has it."""
    trace: tuple[Positive, ...] = ()
    """Steps of which trace.json in the run folder shows every action and transfer of every rank;
    ui.perfetto.dev opens it."""
    profile: tuple[Positive, ...] = ()
    """Steps that torch's profiler records, every operator and kernel, into a file for each rank in
    `profile` in the run folder. Such a step takes longer."""
    console: Literal["lines", "quiet", "json"] = "lines"
    """`lines`: aligned, one every `every` steps. `quiet`: notes and the summary. `json`: an object
    for every step, note and the summary."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of this machine's loopback on which the first rank serves its latest line to Prometheus
    as /metrics; 0 takes a free one."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    wandb: str | None = None
    """Weights & Biases project; without an API key the run is recorded offline."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense peak of one device in TFLOP/s. Default: known chips by name; a CPU is measured."""


class Faults(Section):
    step_timeout: Annotated[float, Field(ge=0)] = 1800.0
    """Seconds that a step, an evaluation or the wait for a save may take; 0: any. What takes longer
    ends all ranks, with their stacks in the run folder and the rank, step and action that hold up
    the others named, so that the launcher starts the run again."""
    restarts: NonNegative = 3
    """Times that the ranks begin again in their processes, from the newest checkpoint or copies in
    memory, when all of them are alive and only a transfer has failed or hangs; not where that was
    at the same step the time before. 0: never; else with `checkpoint.resume=latest` alone, and on
    CPUs alone. Where they do not they end, and the launcher starts them again."""
    check_collectives: bool = False
    """Compare what ranks start (kind, axes, shape, type, action) before it starts, so that a
    mismatch is named instead of a hang. For debugging: every collective asks the store."""
    non_finite: Literal["skip", "replay", "roll_back", "stop"] = "skip"
    """What becomes of a step whose loss or gradients are not finite, which updates nothing: `skip`
    goes on with the next data; `replay` runs it again at once, which tells a fault that passes and
    otherwise names the block, and then skips; `roll_back` continues from the newest checkpoint, and
    leaves out the data of the step if it fails again; `stop` ends the run. All but `stop` give up
    after 20 such steps in a row."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A loss over this factor times the median of the last 64 is a spike: the run continues from
    the newest checkpoint before it, and leaves out the data of the spike. Default: none is."""
    compare_every: NonNegative = 0
    """Compare what replicas hold of the weights, byte by byte in a hash, every so many steps and at
    the end. Where they differ the run continues from the newest checkpoint; a rank that differs
    there again is ended as a bad device. 0: never."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = None
    """Name a rank whose work, without what it waits for others, takes more than so many times the
    median of ranks that run the same stages. The times are the host's. Default: none is."""
    elastic: bool = False
    """Where the launcher has other numbers of ranks than the layout, choose a layout that fits, for
    the same global batch: with fewer data ranks first, then fewer of the other axes. Ranks that it
    has no use for leave."""


class RunConfig(Section):
    """Everything that determines a run. Frozen; equal configs give equal runs."""

    run: Run = Run()
    """Where a run lives, and its seed."""
    model: Model = Model()
    """Architecture."""
    parallel: Parallel = Parallel()
    """How the ranks divide the work."""
    train: Train = Train()
    """Steps, batches, precision and evaluation."""
    optim: Optim = Optim()
    """Optimizer and learning rate."""
    data: Data = Data()
    """Token files and how samples are cut from them."""
    kernels: Kernels = Kernels()
    """What computes each of the functions that have a fast form, by name."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and resuming."""
    meter: Meter = Meter()
    """What is measured and where it is shown."""
    faults: Faults = Faults()
    """What is done about hangs, bad numbers and lost ranks."""
