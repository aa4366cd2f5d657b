"""Train, resume and use a model from Python: `python examples/library.py`, after `make demo`."""

import json
from pathlib import Path

import megaframe

folder = Path("runs/library")
keys = {
    "run.dir": str(folder),
    "train.steps": 6,
    "train.seq": 64,
    "train.global_batch": 4,
    "train.microbatch": 2,
    "train.eval_every": 0,
    "checkpoint.every": 3,
}
config = megaframe.load_config("demo", keys)

# What a run begins with: the loss of a model that knows nothing is about log(vocabulary).
tokens = list(range(100, 132))
begin = megaframe.build_model(config).loss(tokens)

megaframe.train(config)
losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]

# The same folder with more steps: the run continues where it was.
more = {**keys, "train.steps": 8, "checkpoint.resume": "latest"}
megaframe.train(megaframe.load_config("demo", more))

model = megaframe.load_model(folder)
print(f"loss {begin:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")
print("logits", tuple(model.logits(tokens).shape), "parameters", len(model.tensors))
print("".join(model.generate("def main(", tokens=10, seed=1)))

with megaframe.open_checkpoint(folder) as checkpoint:
    weight = checkpoint.read_tensor("embedding.tokens.weight")
    print(f"step {checkpoint.step}, embedding {tuple(weight.shape)} {weight.dtype}")
