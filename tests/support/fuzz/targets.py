"""What is fuzzed: every kind of file, argument and variable that the project reads. Each target has
a maker of valid inputs and a command or a call that takes them."""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS / "support"), str(ROOT / "tools"), str(ROOT)]

from programs import load_program  # noqa: E402
from run_folders import make_lines, write  # noqa: E402

from megaframe.config import RunConfig  # noqa: E402

MODEL = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 257, "norm": "rmsnorm", "ffn": 16}
MODEL |= {"activation": "swiglu", "bias": False, "tie_embeddings": False, "position": "rotary"}
TRAIN = {"seq": 8, "steps": 2, "global_batch": 2, "microbatch": 2, "precision": "fp32"}
CONFIG = {
    "run": {"dir": "run", "device": "cpu"},
    "model": MODEL,
    "train": TRAIN,
    "data": {"sources": [{"path": "tokens", "weight": 1.0}], "tokenizer": "bytes"},
    "optim": {"lr": 0.001, "frozen": []},
    "checkpoint": {"every": 2, "memory_every": 0},
    "metrics": {"peak_tflops": 1.0},
    "kernels": {"matmul": "torch"},
}


@dataclass(frozen=True)
class Target:
    """make: writes valid inputs into the working folder. words: a command line that takes them.
    call: what is called, with `sys.argv` set. files: patterns of the files to change; empty if only
    words and variables are. planted: names that a program reads if they are there, or writes, in a
    folder that somebody else hands over; there, links lead to secrets. variables: environment
    variables to change. statuses: exit statuses
    besides 0 and 2 that are answers. fixed: number of first words that are not changed; a word that
    says where to write stays. passes: whether what is in its files is passed on as it is."""

    name: str
    make: Callable[[], None]
    call: Callable[[], object]
    words: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()
    fixed: int = 0
    passes: bool = False


def load_main(path):
    """Return the function that runs a program of the project."""
    module = load_program(path)

    def run():
        sys.exit(module.main())

    return run


def make_nothing():
    """Make no file."""


def write_tokens():
    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

    draw = np.random.default_rng(0)
    with IndexedDatasetWriter("tokens", np.dtype(np.uint16)) as writer:
        for _ in range(30):
            writer.append(np.append(draw.integers(0, 256, 20), 256).astype(np.uint16))
    tokenizer = {"name": "bytes", "fingerprint": "bytes", "vocabulary": ""}
    record = {"version": 1, "tokenizer": tokenizer, "eod": 256, "documents": 30, "tokens": 630}
    Path("tokens.tokens.json").write_text(json.dumps(record))


def write_label_weights():
    """Write a token file, and a weight file beside it."""
    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

    write_tokens()
    draw = np.random.default_rng(1)
    with IndexedDatasetWriter("tokens.weights", np.dtype("<f4")) as writer:
        for _ in range(30):
            writer.append(draw.random(21, np.float32))


def read_label_weights():
    """Read what a run reads of a token file with weights."""
    from megaframe.data.gpt_dataset import GPTDataset

    dataset = GPTDataset("tokens", "train", (0.9, 0.1, 0.0), 8, 257)
    for window in np.array_split(np.arange(dataset.windows), 8):
        dataset.read_label_weights(window)


def write_blocks():
    """Write a folder of blocks."""
    from megaframe.config.data import DataConfig, DataSourceConfig, StreamingConfig
    from megaframe.data.streaming.corpus import find_corpus
    from megaframe.data.streaming.prepare_blocks import prepare_blocks

    Path("texts").mkdir()
    rows = [json.dumps({"text": f"{number} some text"}) for number in range(40)]
    Path("texts/a.jsonl").write_text("\n".join(rows) + "\n")
    data = DataConfig(tokenizer="bytes", streaming=StreamingConfig(shuffle_bytes=1 << 16))
    corpus = find_corpus(DataSourceConfig(path="texts"), data)
    prepare_blocks(corpus, "blocks")
    shutil.rmtree("texts")


def read_blocks():
    """Read what a run reads of a folder of blocks."""
    from megaframe.config import DataConfig, RunConfig, TrainConfig
    from megaframe.config.model import ModelConfig
    from megaframe.data.loader import Loader

    train = TrainConfig(seq=8, global_batch=2, microbatch=2)
    data = DataConfig(sources=({"path": "blocks"},), tokenizer="bytes", prefetch=0)
    loader = Loader(RunConfig(model=ModelConfig(vocab=257), train=train, data=data), 0, 1)
    try:
        for _ in range(50):
            loader.next()
    finally:
        loader.close()


def write_chats():
    """Write rows of chats, a tokenizer and a chat template."""
    from chat_folders import write_byte_tokenizer

    write_byte_tokenizer(Path(), "{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    chat = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b", "weight": 1}]
    rows = [{"messages": chat, "tools": [{"name": "f"}]}, {"text": "abc", "spans": [[0, 2, 1]]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load_preprocess_chat():
    """Return the program with the template rendered in this process, which may start no other; so
    the template itself is not changed."""
    from megaframe.inference import chat, render_chat

    def render(request):
        try:
            mark = request["mark"]
            texts = [render_chat.render(request["template"], v, mark) for v in request["variables"]]
        except Exception as error:
            return {"error": str(error)}
        return {"texts": texts}

    run = load_main("tools/preprocess_chat.py")

    def run_here():
        chat._run = render
        run()

    return run_here


def read_tokens():
    """Read what a run and an evaluation read of a token file."""
    from megaframe.data.gpt_dataset import GPTDataset
    from megaframe.data.indexed_dataset import IndexedDataset
    from megaframe.data.preprocessing.corpus_files import CorpusFile
    from megaframe.inference.evaluation import read_sequence

    file = IndexedDataset("tokens")
    sum(int(file.get_sequence(number).sum()) for number in range(min(len(file), 1000)))
    dataset = GPTDataset("tokens", "train", (0.9, 0.1, 0.0), 8, 257)
    dataset.read_record()
    for window in np.array_split(np.arange(dataset.windows), 8):
        dataset.read(window)
        dataset.is_document_start(window)
    read_sequence(CorpusFile("tokens.bin"), None)


def write_config():
    write_tokens()
    Path("config.yaml").write_text(json.dumps(CONFIG))


def make_checkpoint():
    """Train a run of two steps, once: later calls copy it."""
    write_config()
    pid = os.fork()
    if pid == 0:
        sys.argv = ["pretrain_gpt.py", "--config", "config.yaml"]
        try:
            with open(os.devnull, "w") as silent:
                os.dup2(silent.fileno(), 1)
            load_main("pretrain_gpt.py")()
        except SystemExit as ended:
            os._exit(ended.code or 0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "no checkpoint could be made"
    shutil.copytree("run/checkpoints/step-00000002", "saved/step-00000002")


def make_text():
    """Make a checkpoint and a text."""
    make_checkpoint()
    Path("text.txt").write_text("a text that is held out\n" * 20)


def make_export(kind):
    """Return a maker of an export of the checkpoint."""

    def make():
        make_checkpoint()
        from megaframe.checkpoint import open_checkpoint

        with open_checkpoint(Path("saved/step-00000002")) as found:
            if kind == "hf":
                from megaframe.checkpoint.convert.huggingface.model_folder import export_model

                export_model(found, Path("exported"), family="llama")
            else:
                from megaframe.checkpoint.convert.dcp import export_checkpoint

                export_checkpoint(found, Path("exported"))
        shutil.rmtree("run")

    return make


def make_tokenizers():
    import made_tokenizers as made

    Path("corpus.txt").write_text(made.CORPUS)
    from megaframe.data.preprocessing.corpus_files import CorpusFile
    from megaframe.data.preprocessing.train_tokenizer import train_sentencepiece

    train_sentencepiece([CorpusFile("corpus.txt")], "pieces", 296, "bpe", 1)
    made.train_tokenizer(Path("hf.json"), "ByteLevel")
    made.train_tokenizer(Path("tokenizer.json"), "ByteLevel")
    Path("tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    Path("ranks.tiktoken").write_bytes(made.rank_lines(made.RANKS))


def read_tokenizer(name):
    def call():
        from megaframe.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(name)
        ids = tokenizer.encode("def area(width): return width ☃")
        tokenizer.decode(ids)
        assert len(tokenizer.count_token_bytes()) == tokenizer.vocab_size

    return call


def run_folder():
    write(Path("run"), make_lines(60), {"metrics": {"wandb": "x"}})
    prediction = {"step_seconds": 2.0, "mfu": 0.4, "breakdown": {"compute": 1.5, "tensor": 0.5}}
    Path("prediction.json").write_text(json.dumps(prediction))
    Path("run/run.log").write_text("a line\n" * 50)
    samples = [{"step": step, "prompt": "It", "text": "is"} for step in range(10, 60, 10)]
    Path("run/samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))


def continue_metrics():
    """Begin a run again in a folder that has metrics."""
    from megaframe.io.output_files import OutputFiles
    from megaframe.metrics.sinks import open_sinks, set_metrics_aside
    from megaframe.resilience.downtime import find_last_saved

    find_last_saved(Path("run"))
    config = RunConfig.model_validate({"run": {"dir": "run"}})
    for sink in open_sinks(config, 30, OutputFiles(Path("run"))):
        sink.close()
    set_metrics_aside(Path("run/metrics.jsonl"))


def write_corpus():
    import pyarrow
    import pyarrow.parquet
    import zstandard

    texts = [f"text {number} ☃" for number in range(50)]
    jsonl = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    Path("a.jsonl").write_text(jsonl)
    Path("b.jsonl.gz").write_bytes(gzip.compress(jsonl.encode()))
    Path("c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl.encode()))
    Path("d.txt").write_text("\n\n".join(texts))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, "e.parquet", write_page_checksum=True, row_group_size=20)
    rows = "".join(f'{n},"{text},\n""quoted"""\n' for n, text in enumerate(texts))
    Path("f.csv").write_text(f"n,text\n{rows}")
    Path("g.tsv.gz").write_bytes(
        gzip.compress("".join(f"{n}\ta\n" for n in ["text", *texts]).encode())
    )


def read_corpus():
    from megaframe.data.preprocessing.corpus_files import CorpusFile, list_corpus_files
    from megaframe.data.preprocessing.documents import read_documents
    from megaframe.data.preprocessing.input_shards import split_file

    for file in list_corpus_files([CorpusFile(".")])[0]:
        for shard in split_file(file, 400):
            for text in read_documents(shard):
                text.encode()


def trace():
    events = [
        {"ph": "X", "cat": kind, "name": name, "ts": 10.0 * at, "dur": 8.0, "args": {"device": 0}}
        for at, (kind, name) in enumerate(
            [("kernel", "gemm"), ("kernel", "nccl"), ("gpu_memcpy", "m")]
        )
    ]
    text = json.dumps({"traceEvents": events})
    Path("one.json").write_text(text)
    Path("two.json.gz").write_bytes(gzip.compress(text.encode()))


def write_queue():
    """Write the file of a queue, and what the queue has left."""
    write_config()
    entry = {"config": "config.yaml", "ranks": "1", "overrides": ["train.steps=3"]}
    runs = {"one": entry, "two": {**entry, "sweep": ["optim.lr=[0.1, 0.2]"], "priority": 3}}
    Path("queue.yaml").write_text(json.dumps({"folder": "queue", "runs": runs}))
    Path("queue").mkdir()
    record = {"words": ["a=1"], "state": "running", "ranks": 1, "starts": 1, "process": [2**30, 1]}
    Path("queue/queue.json").write_text(json.dumps({"runs": {"one": record}, "namespace": "x"}))


def read_queue():
    """Read what a queue reads before it starts a run, and write what it writes."""
    from megaframe.errors import report_errors
    from megaframe.run_queue.queue_file import read_queue_file
    from megaframe.run_queue.queue_page import QueuePage
    from megaframe.run_queue.queue_state import QueueState, RunRecord

    with report_errors():
        _, runs = read_queue_file(Path("queue.yaml"))
        folder = Path("queue")
        state = QueueState.read(folder)
        records = [(run, state.runs.get(run.name, RunRecord([]))) for run in runs]
        QueuePage(folder).write(records)
        state.write(folder)


def write_cluster():
    import yaml

    cluster = yaml.safe_load((ROOT / "configs/clusters/h100-ib.yaml").read_text())
    Path("cluster.yaml").write_text(json.dumps(cluster, default=str))


def write_costs():
    results = {"kill": {"restart": 15.0, "load": 10.0, "warmup": 5.0}, "whole": {"stall": 0.2}}
    Path("chaos_test.json").write_text(json.dumps(results))


def schedule():
    Path("plan.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1  # last\n")


def read_cache():
    from megaframe.model import autotune

    autotune.read_cache(Path("cache.json"), {"cpu": "x"})


def cache():
    entry = {"machine": {"cpu": "x"}, "routines": {"type": "", "products": {}, "attention": {}}}
    Path("cache.json").write_text(json.dumps(entry))


def write_foreign_settings():
    """Write a file of settings of each program that tools/migrate.py reads."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --lr 1e-3"
    more = (
        "--moe-layer-freq '[0]*1+[1]*1' --micro-batch-size 1 --train-samples 99 --window-size 8,0"
    )
    script = f"N=${{N:-2}}\nA=({flags})\nif [ $N = 2 ]; then A+=(--swiglu); fi\n"
    Path("train.sh").write_text(f"{script}torchrun --nnodes $N t.py ${{A[@]}} \\\n {more}\n")
    Path("job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 9\n')
    Path("config.py").write_text("n_head = 6\nn_embd = 64 * n_head\nlearning_rate = 1e-3 / 2\n")
    arguments = {"max_steps": 9, "warmup_ratio": 0.1, "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    Path("arguments.json").write_text(json.dumps(arguments))
    model = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model |= {"num_hidden_layers": 1, "intermediate_size": 8, "rms_norm_eps": 1e-5}
    Path("config.json").write_text(json.dumps(model))


PRETRAIN, TOOL = load_main("pretrain_gpt.py"), load_main("tools/checkpoint.py")
SMALL = ("--config", "config.yaml")
KEYS = tuple(
    f"{section}.{key}={inner}"
    for section, values in CONFIG.items()
    for key, inner in values.items()
    if not isinstance(inner, list)
)
SAVED_IN_RUN = tuple(f"run/checkpoints/step-*/{name}" for name in ("*.json", "*.safetensors"))
SAVED = ("saved/step-*/manifest.json", "saved/step-*/*.safetensors")
PLANTED_SAVED = ("saved/latest", "saved/best", "saved/config.yaml", "saved/step-00000002/lock")
PLANTED_TOKENS = ("out.parts", "out.parts/lock", "out.bin", "out.idx", "out.parts.tmp")
RUN_FILES = ("config.yaml", "environment.json", "run.log", "metrics.jsonl", "samples.jsonl")
WRITTEN = ("report.md", "report.html", "dashboard.html", "faults", "checkpoints", "run-id")
PARTS = tuple(f"{name}.partial" for name in (*RUN_FILES, *WRITTEN[:3]))
BELOW = ("faults/ledger.jsonl", "checkpoints/latest", "checkpoints/step-00000002/manifest.json")
PLANTED_RUN = tuple(f"run/{name}" for name in (*RUN_FILES, *WRITTEN, *PARTS, *BELOW))
MODEL_FILES = ("model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "config.json")
PLANTED_MODEL = tuple(f"exported/{name}" for name in (*MODEL_FILES, "model.safetensors"))
LAUNCHED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WANDB_BASE_URL", "NETRC"),
)


def list_targets():
    """Yield all targets."""
    yield Target("config", write_config, PRETRAIN, (*SMALL, "--dry-run"), ("config.yaml",), fixed=3)
    yield Target("overrides", write_config, PRETRAIN, ("--dry-run", *KEYS), fixed=1)
    yield Target("explain", make_nothing, PRETRAIN, ("--explain", "train.steps"), fixed=1)
    yield Target(
        "environment", write_config, PRETRAIN, (*SMALL, "--dry-run"), variables=LAUNCHED, fixed=3
    )
    files, planted = ("queue.yaml", "queue/queue.json"), ("queue/queue.json", "queue/queue.html")
    yield Target("queue", write_queue, read_queue, files=files, planted=planted)
    planted = ("tokens.idx", "tokens.bin", "tokens.tokens.json")
    yield Target("token files", write_tokens, read_tokens, files=("tokens.*",), planted=planted)
    yield Target("corpus", write_corpus, read_corpus, files=("*.*",), passes=True)
    for name, kind in (
        ("pieces.model", "sentencepiece"),
        ("hf.json", "hf"),
        ("ranks.tiktoken",) * 2,
    ):
        kind = kind.removeprefix("ranks.")
        call = read_tokenizer(f"{kind}:{name}")
        yield Target(kind, make_tokenizers, call, files=(name,), planted=(name,))
    beside = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    given = {"files": beside[:1], "planted": beside}
    yield Target("end of document", make_tokenizers, read_tokenizer("hf:tokenizer.json"), **given)
    for command in (
        "inspect --tensors",
        "verify",
        "reshard --files 2 --to new",
        "export-dcp --to new",
    ):
        first, *options = command.split()
        words = (first, "saved/step-00000002", *options)
        fixed = 1 if first in ("inspect", "verify") else len(words)
        given = {"statuses": (1,), "fixed": fixed, "planted": PLANTED_SAVED}
        yield Target(first, make_checkpoint, TOOL, words, SAVED, **given)
    words = ("diff", "saved/step-00000002", "run/checkpoints/step-00000002")
    yield Target("diff", make_checkpoint, TOOL, words, SAVED, statuses=(1,), fixed=1)
    words = ("--checkpoint", "run", "--prompt", "x", "--tokens", "2", "--tokenizer", "bytes")
    tool, files = load_main("tools/generate.py"), ("run/config.yaml", *SAVED_IN_RUN)
    yield Target("generate", make_checkpoint, tool, words, files, PLANTED_RUN)
    tool, words = load_main("tools/evaluate.py"), ("--checkpoint", "saved", "--text", "text.txt")
    words += ("--tokenizer", "bytes", "--batch", "2")
    yield Target("evaluate", make_text, tool, words, (*SAVED, "text.txt"), PLANTED_SAVED, fixed=4)
    words = ("--input", "a.jsonl", "--tokenizer", "bytes", "--output", "out", "--workers", "1")
    tool = load_main("tools/preprocess_data.py")
    yield Target("preprocess", write_corpus, tool, words, (), PLANTED_TOKENS, fixed=8)
    yield Target("label weights", write_label_weights, read_label_weights, files=("tokens.w*",))
    yield Target("blocks", write_blocks, read_blocks, files=("blocks/*",))
    words = ("--input", "rows.jsonl", "--tokenizer", "hf:tokenizer.json?eod=<|endoftext|>")
    words += ("--output", "out", "--overwrite")
    tool, files = load_preprocess_chat(), ("rows.jsonl", "tokenizer.json")
    yield Target("chats", write_chats, tool, words, files, fixed=7)
    resume = ("checkpoint.resume=saved/step-00000002", "train.steps=3", "checkpoint.every=0")
    yield Target(
        "resume", make_checkpoint, PRETRAIN, (*SMALL, *resume), SAVED, PLANTED_RUN, fixed=5
    )
    words = ("import-dcp", "exported", "--to", "new")
    yield Target(
        "import-dcp",
        make_export("dcp"),
        TOOL,
        words,
        ("exported/.metadata", "exported/__*"),
        fixed=4,
    )
    words = ("import-hf", "exported", "--to", "new")
    given = {"planted": PLANTED_MODEL, "fixed": 4}
    yield Target("import-hf", make_export("hf"), TOOL, words, ("exported/*",), **given)
    runs = ("run/metrics.jsonl", "run/config.yaml", "run/environment.json", "prediction.json")
    texts = ("run/run.log", "run/samples.jsonl")
    words = ("run", "--prediction", "prediction.json")
    dashboard = load_main("tools/dashboard.py")
    yield Target("dashboard", run_folder, dashboard, words, (*runs, *texts), PLANTED_RUN)
    yield Target("report", run_folder, load_main("tools/report.py"), words, runs, PLANTED_RUN)
    yield Target("metrics", run_folder, continue_metrics, files=runs[:1], passes=True)
    words = ("one.json", "two.json.gz", "--gaps", "2")
    yield Target("trace", trace, load_main("tools/overlap_report.py"), words, ("*.json*",))
    words = (
        "--measured",
        "chaos_test.json",
        "--ranks",
        "1024",
        "--costs",
        "restart=15",
        "--target",
        "0.9",
    )
    yield Target("goodput", write_costs, load_main("tools/goodput.py"), words, ("chaos_test.json",))
    words = ("--schedule", "file:plan.txt", "--stages", "2", "--microbatches", "2", "--chunks", "1")
    yield Target("schedule", schedule, load_main("tools/schedule.py"), words, ("plan.txt",))
    words = (
        "--config",
        "gpt2-124m",
        "--cluster",
        "cluster.yaml",
        "--gpus",
        "8",
        "model.vocab=50257",
    )
    yield Target("plan", write_cluster, load_main("tools/plan.py"), words, ("cluster.yaml",))
    yield Target("cache", cache, read_cache, files=("cache.json",))
    migrate, make = load_main("tools/migrate.py"), write_foreign_settings
    yield Target("megatron", make, migrate, ("megatron", "train.sh", "N=2"), ("*.sh",), fixed=1)
    yield Target("torchtitan", make, migrate, ("torchtitan", "job.toml"), ("*.toml",), fixed=1)
    yield Target("nanogpt", make, migrate, ("nanogpt", "config.py"), ("*.py",), fixed=1)
    words = ("hf", "arguments.json", "--model", "config.json")
    yield Target("hf", make, migrate, words, ("*.json",), fixed=1)
