"""All keys of a run, typed and documented: the contract between a user and megaframe.

`model`, `data`, `parallel` and `optim` have modules of their own beside this one.

Sections are frozen; the docstring under a field is what `--explain section.key` prints. Checks of a
single section are made here; checks that need several sections (divisibility, layout) are in
`megaframe/validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.adapters import FROZEN_BASE
from megaframe.config.data import DataConfig
from megaframe.config.model import ModelConfig
from megaframe.config.optim import OptimConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.parts import CallbackPart, LossPart, SinkPart
from megaframe.config.registry import Extensible
from megaframe.config.section import NonNegative, Positive, Section
from megaframe.config.sync import SyncConfig


class RunSection(Section):
    """The run itself: its folder, seed and device."""

    dir: str = "runs/default"
    """Run folder, for the resolved config, metrics and checkpoints."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1234
    """Seed for initial weights, data order and dropout. The same seed gives the same run."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that two runs are bitwise identical on a GPU too."""
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    """Device to train on. `auto` gives each rank a GPU if there are any; a GPU that torch cannot
    use is an error. `shared`: all ranks of a machine compute on its first GPU, or on the CPU if
    there is none, and communicate through host memory with the GPU's collectives. This is slow and
    meant for trying layouts."""
    numa_binding: Literal["auto", "node", "off"] = "auto"
    """`auto` binds each rank's process to the cores and the memory of the NUMA node of its GPU;
    ranks of one node divide its cores. `node` does so on CPUs too, by local rank. `off` leaves
    processes where the launcher puts them."""
    extensions: tuple[str, ...] = ()
    """Python files, or names of importable packages, that bring parts of their own, such as
    optimizers and losses. They are loaded only if the config or the command line of this run names
    them; `docs/guides/extensions.md` describes them."""
    callbacks: tuple[Annotated[CallbackPart, Extensible("callback")], ...] = ()
    """What is called between steps, in this order, on the first rank. Callbacks read metrics, add
    their own and may stop the run; `docs/guides/extensions.md` describes them."""


class BatchRampConfig(Section):
    """A batch that grows at the beginning of a run."""

    start: Positive
    """Global batch of the first step, in samples; a multiple of `increment`."""
    increment: Positive
    """Samples by which the global batch grows at each increase."""
    samples: Positive
    """Samples over which the batch grows from `start` to `train.global_batch`, in equal parts."""


class TrainConfig(Section):
    """Length, batch, precision and recomputation of training."""

    steps: Positive = 1000
    """Optimizer steps in the whole run. With `data.epochs` or `data.phases` they follow from
    that."""
    stop_after: Positive | None = None
    """Step after which the run saves a checkpoint and ends, before `steps`; `checkpoint.resume`
    continues it. Default: it goes on to `steps`, or to the end of its phase (`data.phases`)."""
    seq: Positive = 1024
    """Tokens per sample."""
    global_batch: Positive = 8
    """Samples per optimizer step over all ranks."""
    microbatch: Positive = 1
    """Samples per forward pass on one rank."""
    batch_ramp: BatchRampConfig | None = None
    """Start with a smaller global batch and grow it."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    """Type of the matrix products. bf16 and fp16 keep fp32 weights and gradients as well."""
    fp8: Literal["none", "tensor", "row", "block"] = "none"
    """Multiply in 8 bits in the linear layers and experts of blocks, with bf16 elsewhere. Scales
    are per tensor, per row, or per 128 elements of the summed dimension; there is no mxfp8, whose
    blocks have 32. Emulated on a CPU."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass. `selective` recomputes norms and activation
    functions (about 3% of a step for a third of the activation memory). `full` recomputes each
    block from its input."""
    recompute_blocks: NonNegative | tuple[NonNegative, ...] | Literal["auto"] = 0
    """Number of blocks at the start of each stage (one number, or one per stage) that are
    recomputed from their input whatever `recompute` says. `auto`: as few per stage as fit into the
    memory of the chip (`parallel.cluster`), by the plan."""
    offload: bool = False
    """Keep the inputs of recomputed blocks in host memory until the backward pass. On a CPU they
    are there already."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Compile what lies between matrix products and communication (norms, activations, rotation,
    sums) with this torch.compile backend, except where `kernels` names a kernel. aot_eager is for
    testing."""
    cuda_graph: bool = False
    """Launch all passes of a step as one CUDA graph. Works with data and tensor ranks, and
    with experts that each rank has. What a config cannot record is refused with the reason."""
    loss: Annotated[Literal["cross_entropy"] | LossPart, Extensible("loss")] = "cross_entropy"
    """Loss of a token in training, of all depths of multi-token prediction. Evaluations are always
    cross-entropy."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target probability spread over the vocabulary."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-partition penalty per token (PaLM uses 1e-4)."""
    mtp_weight: Annotated[float, Field(ge=0)] = 0.3
    """Weight of the multi-token prediction loss (`model.mtp_depth`) in training: the mean over
    depths, summed over valid tokens and divided by the batch's valid tokens, like the main loss."""
    eval_every: NonNegative = 0
    """Steps between evaluations on the validation split; 0 disables evaluation."""
    eval_samples: Positive = 64
    """Validation samples per evaluation, the same ones each time."""
    sample_every: NonNegative = 0
    """Steps between samples of text, which the model makes of `sample_prompts`; also at the end. 0:
    none. They are in the run log, in samples.jsonl in the run folder, and where `metrics` sends
    metrics. Needs `data.tokenizer`."""
    sample_prompts: tuple[str, ...] = ("",)
    """sample_every: texts to continue; an empty one begins a new document."""
    sample_tokens: Positive = 64
    """sample_every: most tokens of a sample. Each is a forward pass over the whole text."""
    sample_temperature: Annotated[float, Field(ge=0)] = 0.8
    """sample_every: divides the scores that a token is drawn by; 0 takes the likeliest token. What
    is drawn depends on `run.seed` and the step."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends, or is to be continued later."""
        return min(self.steps, self.stop_after or self.steps)


class KernelsConfig(Section):
    """Which implementation of each kernel runs."""

    elementwise: Literal["auto", "triton", "torch", "liger", "reference"] = "auto"
    """LayerNorm and RMSNorm, MLP activations, rotation of queries and keys. For all keys of this
    section: `auto` picks the fastest supported kernel on a GPU and plain PyTorch on a CPU.
    `reference` uses plain PyTorch everywhere. Naming an unavailable kernel is an error, and so is
    `auto` on a GPU without Triton."""
    attention: Literal[
        "auto", "triton", "torch", "torch-flash", "cudnn", "flash-attn", "reference"
    ] = "auto"
    """Attention. Ring context parallelism needs a kernel that returns the log-sum-exp: triton."""
    loss: Literal["auto", "triton", "reference"] = "auto"
    """Cross-entropy of a chunk of logits, whose gradient replaces them in place."""
    update: Literal["auto", "triton", "torch", "apex", "reference"] = "auto"
    """AdamW over a flat span, and the sums of squares for the gradient norm. Kernels sum per
    bucket, plain code per parameter."""
    experts: Literal["auto", "triton", "torch", "cuda", "reference"] = "auto"
    """The router, unless experts are grouped; permuting tokens by expert and back, if one rank has
    all experts and none has a capacity limit, so that nothing waits for the host; grouped matrix
    products of all experts."""
    matmul: Literal["auto", "torch", "onednn"] = "auto"
    """Library of matrix products on a CPU. `auto` measures at the start of a run which one is
    fastest, for each kind of product, and how attention is; a resumed run keeps that. With
    `run.deterministic` it is `torch`. `torch` takes what torch takes (MKL for fp32), `onednn`
    oneDNN; types that the processor does not multiply are copied to fp32."""
    fp8: Literal["auto", "triton", "torch", "reference"] = "auto"
    """Rounding to 8 bits and 8-bit matrix products, for `train.fp8`. On a GPU that has no fast
    ones only `reference` runs, slower than 16 bits; otherwise that is an error."""
    recurrent: Literal["auto", "triton", "reference"] = "auto"
    """States of gated delta nets, Kimi delta attention and Mamba-2. A kernel divides samples into
    chunks of its own, whatever the mixer's `chunk` is."""
    sparse_attention: Literal["auto", "triton", "reference"] = "auto"
    """Attention to the latents of chosen keys, with `model.indexer.absorb`, and the shares of these
    keys that its indexer learns from."""
    codes: Literal["auto", "triton", "bitsandbytes", "reference"] = "auto"
    """Values of weights that are kept as codes (`model.adapters.quantize_base`). `bitsandbytes`
    makes those of nf4, in blocks of 32, 64, ... 1024; its levels differ by less than 2e-7."""


class CheckpointConfig(Section):
    """When and where checkpoints are saved, and from which one a run starts."""

    every: NonNegative = 1000
    """Steps between checkpoints; the end of the run is saved too. 0 never saves."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Also keep for good the checkpoints of steps that are multiples of this; 0: none."""
    keep_best: NonNegative = 0
    """Also keep this many checkpoints with the lowest evaluation losses; the file `best` names the
    first of them, and FOLDER/best stands for it. Needs `train.eval_every`, and counts checkpoints
    of steps that are evaluated. 0: none."""
    huggingface_every: NonNegative = 0
    """Steps between exports: `huggingface/step-N` in the folder of checkpoints is a folder that
    Hugging Face's `from_pretrained` loads, of the family that `model.family` names. A multiple of
    `every`; the end of the run is exported, too. The newest `keep` of them are kept, and those of
    `keep_every`. 0: none."""
    read_back: bool = True
    """Read each checkpoint back from disk or store and check it before deleting older ones. Without
    it there is half as much I/O, but a storage fault goes unnoticed until the checkpoint is
    loaded."""
    folder: str | None = None
    """Where to save checkpoints: a path, or the URL of an object store such as s3://bucket/run.
    Must not be shared with another run. Default: `checkpoints` in the run folder."""
    memory_every: NonNegative = 0
    """Steps between copies of every rank's state into the memory of its own node and of another
    one. If these are newer than the saved checkpoint, `resume=latest` continues from them. 0
    disables them."""
    memory_dir: str = "/dev/shm"
    """memory_every: a folder in the node's memory, with room for two copies of the state of twice
    the node's ranks."""
    resume: str | None = None
    """`latest` resumes from the newest checkpoint in `folder`, or starts fresh if there is none
    yet; `best` from the best one of `keep_best`. Otherwise the path or URL of a checkpoint to
    resume from, or of a folder of checkpoints or a run folder, whose latest is used."""
    weights: str | None = None
    """Path or URL of a checkpoint to start a new run's weights from, or of a folder of checkpoints
    or a run folder, whose latest is used. If the run has experts and the checkpoint has none, each
    expert starts as a copy of its layer's MLP, or of a part of it."""
    adapters: str | None = None
    """A folder that peft saved, whose adapters those of `model.adapters` start from in a new run
    that has `weights`."""


class MetricsConfig(Section):
    """What is measured, and where it is written."""

    every: Positive = 1
    """Steps between lines on the console; metrics.jsonl has every step."""
    experts_every: NonNegative = 100
    """Steps between lines of metrics.jsonl that include the token count of every expert; 0:
    none."""
    ranks_every: NonNegative = 100
    """Steps between lines of metrics.jsonl that include the time breakdown of every rank; 0:
    none."""
    gradient_noise_every: NonNegative = 0
    """Steps between measurements of the gradient noise scale, from which the critical batch follows
    (docs/guides/batch.md); 0: none. It compares the gradients of data ranks with their sum, so it
    needs two or more of them, and no gradient compression. A measured step reads all gradients once
    more, sums them once more over context ranks, and is not launched as a CUDA graph."""
    trace: tuple[Positive, ...] = ()
    """Steps to trace: trace.json in the run folder shows every action and transfer of every rank,
    for ui.perfetto.dev."""
    profile: tuple[Positive, ...] = ()
    """Steps to record with torch's profiler, every operator and kernel, one file per rank in
    `profile` in the run folder. A profiled step takes longer."""
    console: Literal["lines", "quiet", "json"] = "lines"
    """`lines`: aligned lines, one every `every` steps. `quiet`: notes and the summary only. `json`:
    one object per step and note, and the summary."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Loopback port on which the first rank serves its latest line to Prometheus as /metrics; 0
    takes a free one."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    wandb: str | None = None
    """Weights & Biases project. Without an API key each start of the run is recorded offline, in
    `wandb` in the run folder, for `wandb sync` (docs/guides/dashboard.md)."""
    sinks: tuple[Annotated[SinkPart, Extensible("sink")], ...] = ()
    """Sinks of extensions, which also take the metrics of every step."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense peak of one device in TFLOP/s. Default: known chips by name; a CPU is measured."""


class EvaluateConfig(Section):
    """Tasks of lm-evaluation-harness that a model is scored on while it trains."""

    tasks: tuple[str, ...] = ()
    """Names of tasks or groups. All ranks answer them together, so any layout works. Their data
    must be on the machine. Needs `data.tokenizer` and `pip install 'megaframe[evaluate]'`."""
    every: Positive = 1000
    """Steps between evaluations on `tasks`, also at the end."""
    folder: str | None = None
    """Folder of YAML files that define tasks. They can name Python code to run: only use files from
    sources you trust. Default: the tasks of the harness."""
    shots: NonNegative | None = None
    """Examples before each question. Default: as many as a task says."""
    limit: Positive | None = None
    """Questions of each task. Default: all."""
    chat: bool = False
    """Ask each question as a user of a chat does, by the chat template beside the tokenizer."""


class FaultToleranceConfig(Section):
    """How faults are detected, and what a run does about them."""

    step_timeout: Annotated[float, Field(ge=0)] = 1800.0
    """Maximum seconds for a step, an evaluation or the wait for a save; 0: no limit. When it is
    exceeded, all ranks write their stacks to the run folder, the rank, step and action that block
    the others are named, and all ranks exit so that the launcher can restart the run."""
    restarts: NonNegative = 3
    """How often the ranks may restart within their processes, from the newest checkpoint or copies
    in memory, when all are alive and only communication has failed or hangs. They do not if the
    last restart was at the same step. 0: never. Needs `checkpoint.resume=latest`. Where the device
    or NCCL does not allow it (docs/guides/faults.md), ranks exit, and the launcher restarts
    them."""
    check_collectives: bool = False
    """Compare collectives across ranks (kind, axes, shape, type, action), and messages with their
    other ends, before starting them, so that a mismatch is reported instead of hanging, with both
    calls, ranks and lines. For debugging: every transfer queries the store."""
    non_finite: Literal["skip", "replay", "roll_back", "stop"] = "skip"
    """What to do about a step whose loss or gradients are not finite; its update is always skipped.
    `skip` continues with the next data. `replay` first reruns the step, which recognises a
    transient fault or else names the block, and then skips it. `roll_back` resumes from the newest
    checkpoint and drops the step's data if it fails again. `stop` ends the run. All but `stop` give
    up after 20 such steps in a row."""
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A loss above this factor times the median of the last 64 is a spike: the run resumes from the
    newest checkpoint before it and drops the data of the spike. Default: no detection."""
    compare_every: NonNegative = 0
    """Steps between comparisons of replicated weights, by a hash of their bytes; also at the end.
    If replicas differ, the run resumes from the newest checkpoint. If they differ there again, the
    run ends and names the bad device. 0: never."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = None
    """Report a rank whose work, excluding waiting for others, takes more than this factor times the
    median of the ranks that run the same stages. On a GPU it is the time of the device. Default: no
    detection."""
    elastic: bool = False
    """If the launcher starts another number of ranks than the layout needs, choose a layout that
    fits and keeps the global batch: fewer data ranks first, then fewer ranks on the other axes.
    Unused ranks exit."""


class RunConfig(Section):
    """Everything that determines a run. Frozen; equal configs give equal runs."""

    run: RunSection = RunSection()
    """Where a run is stored, and its seed."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks divide the work."""
    sync: SyncConfig = SyncConfig()
    """How islands of data ranks train together."""
    train: TrainConfig = TrainConfig()
    """Steps, batches, precision and evaluation."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning rate."""
    data: DataConfig = DataConfig()
    """Token files and how samples are cut from them."""
    kernels: KernelsConfig = KernelsConfig()
    """Which kernel computes each function that has a fast implementation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Tasks on which the model is scored."""
    metrics: MetricsConfig = MetricsConfig()
    """What is measured and where it is shown."""
    faults: FaultToleranceConfig = FaultToleranceConfig()
    """How to handle hangs, non-finite numbers and lost ranks."""

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        """Patterns of the names of parameters that are not trained: those of `optim.frozen`, those
        that nothing trains, and with adapters all but theirs."""
        base = () if self.model.adapters is None else (FROZEN_BASE,)
        return *self.optim.frozen, *self.model.untrained, *base

    @property
    def trains_in_islands(self) -> bool:
        """Whether weights are synchronised with islands of this run or, by a server, of others."""
        return self.parallel.islands > 1 or self.sync.server is not None

    def replace(self, **sections: Mapping[str, object]) -> RunConfig:
        """Return a copy with other values, which are not checked, of some keys of these sections.

        Args:
            sections: Values of keys by section, such as `train={"seq": 8}`.
        """
        changed = {
            name: getattr(self, name).model_copy(update=values) for name, values in sections.items()
        }
        return self.model_copy(update=changed)
