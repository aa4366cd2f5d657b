"""Losses of the first steps of fine-tuning on dialogues, beside the Trainer of transformers.

Both begin with the same model, in fp32, and get the same batches, in which only the tokens of
answers count. The dialogues are made of this repository's guides. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tokenizers
import torch
import transformers
from harness import PEERS
from recorded_batches import write_batches

from megaframe.config import load

ROOT = Path(__file__).resolve().parents[2]
STEPS, SEQ, BATCH, MICROBATCHES = 20, 128, 8, 2
OPTIMIZER = {
    **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
}
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOLERANCE = 1e-5


def main() -> None:
    """Train both, print their losses, and say whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--huggingface-python", required=True, help="a Python with accelerate")
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, versions = compare(Path(folder), arguments.huggingface_python)
    print(f"{'step':>4} {'megaframe':>12} {'transformers':>12} {'difference':>11}")
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        print(f"{step:>4} {one:>12.7f} {other:>12.7f} {one - other:>11.1e}")
    largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    verdict = "within" if largest <= TOLERANCE else "NOT within"
    print(f"largest difference of {len(ours)} steps: {largest:.1e}, {verdict} {TOLERANCE:.0e}")
    if arguments.write:
        record = {"megaframe": ours, "transformers": theirs, "versions": versions}
        arguments.write.write_text(json.dumps(record, indent=1) + "\n")


def compare(folder: Path, python: str) -> tuple[list[float], list[float], dict[str, str]]:
    """Return the losses of both, and the peer's versions."""
    model, data, run = folder / "model", folder / "chats", folder / "run"
    write_model(model)
    dialogues = write_dialogues(folder / "chats.jsonl")
    tokenizer = f"hf:{model}/tokenizer.json?eod={MARKS[0]}"
    template = str(ROOT / "docs/examples/chatml.jinja")
    run_tool(
        *("tools/preprocess_chat.py", "--input", str(folder / "chats.jsonl")),
        *("--tokenizer", tokenizer, "--template", template, "--output", str(data)),
    )
    run_tool("tools/checkpoint.py", "import-hf", str(model), "--to", str(folder / "checkpoints"))
    keys = [
        *(f"run.dir={run}", "run.device=cpu", "train.precision=fp32", f"train.seq={SEQ}"),
        *(f"train.steps={STEPS}", f"train.global_batch={BATCH}", "optim.schedule=constant"),
        f"train.microbatch={BATCH // MICROBATCHES}",
        *(f"optim.{name}={value}" for name, value in OPTIMIZER.items()),
        *(f"data.sources=[{data}]", "data.split=[1,0,0]", f"data.tokenizer={tokenizer}"),
        *("checkpoint.every=0", "train.eval_every=0"),
    ]
    config_path = str(folder / "checkpoints/config.yaml")
    batches = write_batches(load(config_path, keys), STEPS, folder / "batches.safetensors")
    counted = float((batches["labels"] >= 0).float().mean())
    print(f"{dialogues} dialogues; {counted:.0%} of the labels count")
    run_tool("pretrain_gpt.py", "--config", config_path, *keys)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    ours = [json.loads(line)["loss"] for line in lines]
    settings = json.dumps({**OPTIMIZER, "microbatches": MICROBATCHES})
    peer = subprocess.run(
        [
            *(python, str(PEERS / "finetune_trainer.py"), "--model", str(model)),
            *("--batches", str(folder / "batches.safetensors"), "--settings", settings),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(peer.stdout.splitlines()[-1])
    return ours, answer["losses"], answer["versions"]


def run_tool(*words: str) -> None:
    """Run a command of this repository."""
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def write_model(folder: Path) -> None:
    """Write a random Llama of 1.3 million parameters with a tokenizer of bytes and marks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256 + len(MARKS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_dialogues(path: Path) -> int:
    """Write a dialogue of each section of the guides: its heading is asked for, its first paragraph
    is the answer. Returns how many there are."""
    rows = []
    for guide in sorted((ROOT / "docs/guides").glob("*.md")):
        sections = re.split(r"^#+ ", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        for section in sections:
            heading, _, body = section.partition("\n")
            answer = next((part for part in body.split("\n\n") if part.strip()), "").strip()
            if answer and not answer.startswith("```"):
                rows.append([("user", f"What about {heading}?"), ("assistant", answer)])
    text = "".join(
        json.dumps({"messages": [{"role": role, "content": said} for role, said in row]}) + "\n"
        for row in rows
    )
    path.write_text(text, encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    main()
