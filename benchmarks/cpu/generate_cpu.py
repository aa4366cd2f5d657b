"""Speed of greedy generation on a CPU: megaframe with its cache of keys and values, without it, and
`generate` of Hugging Face transformers with the exported model.

All three have the same random weights and prompt in one process, take turns, and must write the
same tokens. A random model does not end a text, so all write equally many.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from harness import describe_machine, describe_processor, read_commit

import megaframe
from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface.model_folder import export_model
from megaframe.checkpoint.reshard import as_bytes, assemble_checkpoint
from megaframe.checkpoint.shard_file import FileEntry, TensorBox
from megaframe.checkpoint.train_state import make_initial_train_state
from megaframe.data.microbatch import Microbatch
from megaframe.inference.generation import SampleRequest, SamplingOptions, load_stage, sample
from megaframe.model.model_chunk import list_model_specs
from megaframe.pipeline_parallel.stage import Stage

SIZES = {
    **{"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 8192},
    **{"norm": "rmsnorm", "activation": "swiglu", "init_std": 0.05},
}
"""A model like Llama with 32 million parameters."""


def write_checkpoint(folder: Path, precision: str, seq: int) -> Path:
    """Write random weights, and return their checkpoint."""
    overrides = {f"model.{key}": value for key, value in SIZES.items()}
    config = megaframe.load_config(
        "demo",
        {**overrides, "train.precision": precision, "train.seq": seq, "data.tokenizer": None},
    )
    generator = torch.Generator().manual_seed(0)
    specs = list_model_specs(config.model, config.train)
    boxes = [TensorBox(s.name, s.shape, (0,) * len(s.shape), s.shape, "F32") for s in specs]

    def fill(entry: FileEntry) -> memoryview:
        is_gain = entry.name.endswith("gain")
        values = torch.randn(entry.shape, generator=generator) * (0.0 if is_gain else 0.05)
        return as_bytes(values + is_gain)

    state = make_initial_train_state(config).model_dump(mode="json")
    path = assemble_checkpoint(folder, 0, state, [boxes], fill)
    assert isinstance(path, Path)
    return path


def list_contenders(
    stage: Stage, folder: Path, precision: str, prompt: list[int], tokens: int
) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    """Yield the name of each contender, and a function that returns the ids that it writes."""
    from transformers import AutoModelForCausalLM

    def with_cache() -> list[int]:
        request = SampleRequest(prompt, tokens, SamplingOptions(), 0, lambda ids: False)
        *_, ids = sample(stage, request, context=len(prompt) + tokens)
        return ids

    def without_cache() -> list[int]:
        ids, head = list(prompt), stage.head
        assert head is not None
        for _ in range(tokens):
            seen = torch.tensor([ids])
            hidden = stage.compute_hidden(Microbatch(seen, seen, seen.new_zeros(1)))[-1]
            with torch.no_grad():
                ids.append(int(head.compute_logits(hidden).argmax()))
        return ids

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def transformers() -> list[int]:
        ids = torch.tensor([prompt])
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        made = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return [int(number) for number in made[0]]

    yield "megaframe", with_cache
    yield "megaframe without a cache", without_cache
    yield "transformers", transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="tokens that each writes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompt = list(range(5, 21))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_checkpoint(folder / "own", arguments.precision, len(prompt) + arguments.tokens)
        with open_checkpoint(path) as checkpoint:
            export_model(checkpoint, folder / "theirs", tokenizer="none", family="llama")
        stage = load_stage(path)
        contenders = dict(
            list_contenders(stage, folder / "theirs", arguments.precision, prompt, arguments.tokens)
        )
        seconds: dict[str, list[float]] = {each: [] for each in contenders}
        texts: dict[str, list[int]] = {}
        for _ in range(arguments.rounds):
            for each, generate in contenders.items():
                start = time.perf_counter()
                texts[each] = generate()
                seconds[each].append(time.perf_counter() - start)
    print(f"commit {read_commit()[:8]}, {describe_processor({'machine': describe_machine()})}, ")
    print(f"{arguments.threads} threads, {arguments.precision}, {arguments.tokens} tokens")
    own = statistics.median(seconds["megaframe"])
    for each, times in seconds.items():
        rates = sorted(arguments.tokens / time_taken for time_taken in times)
        same = sum(a == b for a, b in zip(texts[each], texts["megaframe"], strict=True))
        print(
            f"{each:26} {statistics.median(rates):8,.0f} tokens/s  "
            f"({rates[0]:,.0f}-{rates[-1]:,.0f})  megaframe is {statistics.median(times) / own:.2f}"
            f" times as fast, {same} of {len(texts[each])} tokens are the same"
        )


if __name__ == "__main__":
    main()
