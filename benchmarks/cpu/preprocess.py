"""Preprocessing compared with the bare tokenizer library, in turns in one process on one core.

The library gets all texts in memory, its fastest call is used, and its ids are thrown away; its
usual call, which makes Python lists, is measured too. Ours reads jsonl, encodes, appends document
ends, writes the token file with its journal, and flushes it to disk. The ratio is therefore the
cost of everything except the tokenizer. The corpus is read several times, so that a run is long
enough to measure. With `--megatron-python`, the files are compared with those that megatron-core
writes and reads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, Spread, describe_measurement

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.preprocess import PreprocessJob, preprocess
from megaframe.data.preprocessing.train_tokenizer import train_sentencepiece

PEER = Path(__file__).resolve().parents[1] / "peers" / "token_files_megatron_core.py"
VOCAB = 8192
LARGE_VOCAB = 65_500
Calls = dict[str, Callable[[], Any]]
Runs = dict[str, list[dict[str, float]]]
LIBRARIES = ("sentencepiece", "tokenizers", "numpy")


def make_corpus(folder: Path, megabytes: float) -> tuple[Path, list[str]]:
    """Return the demo corpus as a file and as texts."""
    path = folder / "corpus.jsonl"
    tool = str(ROOT / "tools" / "demo_corpus.py")
    command = [sys.executable, tool, "--output", str(path), "--megabytes", str(megabytes)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path, [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


def train_hugging_face(texts: Sequence[str], path: Path) -> None:
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.save(str(path))


def list_bare_libraries(folder: Path, texts: list[str]) -> dict[str, tuple[str, Calls]]:
    """Return for each contender the tokenizer's name in ours, and the library's own calls, fastest
    first."""
    import sentencepiece
    import tokenizers

    def make_sentencepiece_calls(path: Path) -> Calls:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return {
            "library": lambda: model.encode(texts, num_threads=1, return_type="numpy"),
            "library, lists": lambda: model.encode(texts, num_threads=1),
        }

    model = tokenizers.Tokenizer.from_file(str(folder / "hf.json"))
    calls: dict[str, tuple[str, Calls]] = {
        f"sentencepiece {kind}": (
            f"sentencepiece:{folder / kind}.model",
            make_sentencepiece_calls(folder / f"{kind}.model"),
        )
        for kind in ("bpe", "unigram")
    }
    calls["hugging face bpe"] = (
        f"hf:{folder / 'hf.json'}",
        {
            "library": lambda: [
                encoding.ids
                for encoding in model.encode_batch_fast(texts, add_special_tokens=False)
            ]
        },
    )
    return calls


def time_action(action: Callable[[], Any]) -> dict[str, float]:
    """Return the elapsed seconds and this process's processor seconds."""
    start, busy = time.perf_counter(), time.process_time()
    action()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}


def measure_speed(
    folder: Path, inputs: Sequence[str], texts: list[str], rounds: int
) -> dict[str, Runs]:
    """Return runs of the bare library and of ours, in turns, by tokenizer."""
    measured: dict[str, Runs] = {}
    for title, (name, bare) in list_bare_libraries(folder, texts).items():
        output = str(folder / title.replace(" ", "-"))
        job = PreprocessJob(tuple(map(CorpusFile, inputs)), name, output)

        def preprocess_job(job: PreprocessJob = job) -> None:
            preprocess(job, overwrite=True)

        preprocess_job()
        contenders = {**bare, "megaframe": preprocess_job}
        runs: Runs = {who: [] for who in contenders}
        for _ in range(rounds):
            for who, action in contenders.items():
                runs[who].append(time_action(action))
        measured[title] = runs
    return measured


def summarise(measured: dict[str, Runs], megabytes: float) -> dict[str, Any]:
    """Print and return MB of text per second, and our speed over the library's in each round."""
    summary: dict[str, Any] = {}
    for title, runs in measured.items():
        summary[title] = {}
        for clock in ("seconds", "cpu_seconds"):
            speeds = {who: [megabytes / run[clock] for run in runs[who]] for who in runs}
            summary[title][clock] = {}
            for who, values in speeds.items():
                rate = Spread.of(values)
                pairs = zip(values, speeds["library"], strict=True)
                ratio = Spread.of([value / bare for value, bare in pairs])
                print(
                    f"{title:<23}{clock:<12}{who:<15}{rate.median:6.2f} MB/s "
                    f"({rate.low:.2f}-{rate.high:.2f})  ratio {ratio.median:.3f} "
                    f"({ratio.low:.3f}-{ratio.high:.3f})"
                )
                summary[title][clock][who] = {
                    "megabytes_per_second": asdict(rate),
                    "ratio": asdict(ratio),
                }
    return summary


def compare_with_megatron(python: Path, folder: Path, prefix: str) -> dict[str, Any]:
    """Compare our files with a small and a large vocabulary with theirs, both ways. Raises an error
    if a byte differs."""
    dataset = IndexedDataset(prefix)
    tokens, lengths = np.asarray(dataset.tokens), np.asarray(dataset.lengths)
    results = {}
    for vocab in (VOCAB, LARGE_VOCAB):
        results[str(vocab)] = compare_one(python, folder, tokens, lengths, vocab)
    return results


def compare_one(
    python: Path, folder: Path, tokens: np.ndarray, lengths: np.ndarray, vocab: int
) -> dict[str, Any]:
    from megaframe.data.indexed_dataset import choose_token_dtype
    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

    our_prefix, their_prefix = str(folder / f"ours{vocab}"), str(folder / f"theirs{vocab}")
    start = time.perf_counter()
    with IndexedDatasetWriter(our_prefix, choose_token_dtype(vocab)) as writer:
        writer.append_batch(tokens, lengths)
    seconds = time.perf_counter() - start
    arrays = folder / "arrays.npz"
    np.savez(arrays, tokens=tokens, lengths=lengths)
    written = run_peer(python, "write", their_prefix, arrays, "--vocab", str(vocab))
    for suffix in (".bin", ".idx"):
        pair = [Path(f"{prefix}{suffix}").read_bytes() for prefix in (our_prefix, their_prefix)]
        if pair[0] != pair[1]:
            sys.exit(f"vocabulary {vocab}: {suffix} differs from megatron-core's")
    read = run_peer(python, "read", our_prefix, arrays)
    peer_arrays, dataset = np.load(arrays), IndexedDataset(their_prefix)
    for name in ("tokens", "lengths", "documents"):
        if not np.array_equal(peer_arrays[name], getattr(dataset, name)):
            sys.exit(f"vocabulary {vocab}: {name} read differently by megatron-core")
    print(
        f"vocabulary {vocab}: {tokens.size} tokens, {dataset.dtype}: .bin and .idx equal to "
        f"megatron-core's byte for byte, read alike both ways"
    )
    return {
        "tokens": tokens.size,
        "dtype": str(dataset.dtype),
        "equal": True,
        "write_seconds": seconds,
        "megatron_core_write_seconds": written["seconds"],
        "megatron_core_read_seconds": read["seconds"],
    }


def run_peer(python: Path, action: str, prefix: str, arrays: Path, *options: str) -> dict[str, Any]:
    command = [str(python), str(PEER), action, "--prefix", prefix, "--arrays", str(arrays)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"megatron-core failed to {action}:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> None:
    arguments = _parse_options()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, texts = make_corpus(folder, arguments.megabytes)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        for kind in ("bpe", "unigram"):
            model = str(folder / kind)
            train_sentencepiece([CorpusFile(str(corpus))], model, VOCAB, kind, 2)
        train_hugging_face(texts[:200], folder / "hf.json")
        texts, megabytes = texts * arguments.repeat, megabytes * arguments.repeat
        print(f"{len(texts)} documents, {megabytes:.1f} MB, {arguments.rounds} rounds, one process")
        measured = measure_speed(folder, [str(corpus)] * arguments.repeat, texts, arguments.rounds)
        summary = summarise(measured, megabytes)
        files = {}
        if arguments.megatron_python:
            python = arguments.megatron_python.absolute()  # not resolved: a venv's python is a link
            files = compare_with_megatron(python, folder, str(folder / "sentencepiece-bpe"))
        else:
            print("megatron-core is left out: --megatron-python PATH names one that has it")
    if arguments.write:
        document = {
            **describe_measurement(),
            "versions": {library: version(library) for library in LIBRARIES},
            "config": {"documents": len(texts), "megabytes": megabytes, "vocab": VOCAB},
            "summary": summary,
            "megatron_core_files": files,
            "rounds": measured,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender")
    parser.add_argument("--megabytes", type=float, default=30.0, help="of the corpus, at most")
    parser.add_argument("--repeat", type=int, default=3, help="times that the corpus is read")
    parser.add_argument("--megatron-python", type=Path, help="interpreter with megatron-core")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks/results/preprocess.json",
        help="write all measurements as JSON (default: benchmarks/results/preprocess.json)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
