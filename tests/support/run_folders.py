"""Run folders with synthetic metrics in a run's format, for any number of steps and ranks."""

import json
import math
import random

PARTS = (
    "compute", "bubble", "optimizer", "data", "checkpoint", "evaluation", "other",
    "communication/data", "communication/tensor",
)  # fmt: skip


def make_lines(steps, ranks=4, stages=2, ranks_every=10, start=0, seed=0):
    """Yield metrics lines, one a step; every `every`-th one has rows with all ranks."""
    draw = random.Random(seed)
    for step in range(start + 1, start + steps + 1):
        time = {part: 0.01 * (1 + draw.random()) for part in PARTS}
        time |= {"compute": 0.5, "checkpoint": 0.2 if step % 50 == 1 and step > 1 else 0.0}
        seconds = sum(time.values())
        mfu = 0.3 * 0.5 / seconds
        lost = {part: spent / seconds for part, spent in time.items() if part != "compute"}
        lost = {"recompute": 0.1, **lost, "stragglers": 0.0}
        line = {
            "step": step, "at": 1e9 + step, "loss": 2 + 8 * math.exp(-step / 50),
            "grad_norm": 1 + draw.random(), "lr": 1e-3, "tokens": 1024,
            "tokens_per_second": 1024 / seconds, "tflops_per_second": 100 * mfu, "mfu": mfu,
            "mfu_full_attention": 1.1 * mfu, "hfu": 1.2 * mfu, "memory_bytes": 1 << 30,
            "allocator": {"reserved_bytes": 2 << 30, "fragmented_bytes": 1 << 28},
            "bytes": {"data": 1 << 20, "tensor": 1 << 21}, "seconds": seconds, "time": time,
            "stages": {"work": [0.5] * stages, "work_max": [0.6] * stages,
                       "bubble": [0.01] * stages},
            "stragglers": 0.0, "bandwidth": {"data": 1e9, "tensor": 1e10},
            "lost": {"kernels": 1 - mfu - sum(lost.values()), **lost}, "sources": [step, 2 * step],
            "skipped": float(step == 7),
            "experts": {"max_load": [1.0 + draw.random() for _ in range(3)]},
        }  # fmt: skip
        if step == 20:
            line["resumed_after"] = 19
        if ranks_every and step % ranks_every == 0:
            line["eval_loss"], line["eval_losses"] = 3.0, {"web": 2.5, "code": 3.5}
            line["eval_bits_per_byte_of"] = {"web": 0.9, "code": 1.3}
            line["eval_tasks"] = {"colours": {"acc": 0.25}}
            line["eval_bits_per_byte"] = 1.5
            line["gradient_noise"] = {"critical_batch": 1e6 + step}
            work = [0.5 + 0.2 * (rank == 1) for rank in range(ranks)]
            memory = {f"held/{kind}": [1e8] * ranks for kind in ("weights", "optimizer")}
            line["ranks"] = {"work": work, "memory_bytes": [1e9] * ranks, **memory}
            line["experts"]["tokens"] = {str(n): [1.0, 3.0, 0.0, 4.0] for n in range(3)}
        yield line


def write(folder, metrics, config=None, environment=None):
    """Write a run folder with these lines; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for line in metrics:
            file.write(json.dumps(line) + "\n")
    settings = {"data": {"sources": [{"path": "web"}, {"path": "code"}]}, **(config or {})}
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "environment.json").write_text(json.dumps({"ranks": 4, **(environment or {})}))
    return folder
