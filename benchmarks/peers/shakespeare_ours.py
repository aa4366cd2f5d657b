"""megaframe on the character-level run: a token file, pretrain_gpt.py and nanoGPT's settings.

The two splits are the two documents of one file, separated by `data.split`. Validation loss is the
run's own evaluation after its last step, over every window of the validation text. The first step,
and the last one, which evaluates, are not timed.
"""

from __future__ import annotations

import resource
import tempfile
from importlib.metadata import version
from pathlib import Path

from ours import pretrain, write_documents
from shakespeare_settings import SETTINGS, Text, make_parser, read_text
from workload import emit, read_peak_rss_bytes


def make_overrides(prefix: Path, text: Text, steps: int, position: str) -> list[str]:
    """Return nanoGPT's settings as keys of the config. nanoGPT's own `position` is learned."""
    shape = SETTINGS
    return [
        f"model.layers={shape.layers}",
        f"model.heads={shape.heads}",
        f"model.hidden={shape.hidden}",
        f"model.vocab={text.vocab}",
        "model.norm=layernorm",
        f"model.position={position}",
        "model.activation=gelu",
        "model.bias=false",
        "model.tie_embeddings=true",
        f"train.steps={steps}",
        f"train.seq={shape.seq}",
        f"train.global_batch={shape.batch}",
        f"train.microbatch={shape.batch}",
        "train.precision=fp32",
        f"train.eval_every={steps}",
        f"train.eval_samples={text.validation_windows}",
        f"optim.lr={shape.learning_rate}",
        f"optim.min_lr={shape.min_learning_rate}",
        "optim.schedule=cosine",
        f"optim.warmup={min(shape.warmup, steps - 1)}",
        f"optim.beta1={shape.beta1}",
        f"optim.beta2={shape.beta2}",
        f"optim.weight_decay={shape.weight_decay}",
        f"optim.clip={shape.clip}",
        f"data.sources=[{{path: {prefix}}}]",
        "data.split=[0.5, 0.5, 0]",
        "checkpoint.every=0",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--position", choices=("learned", "rotary"), default="learned")
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "tokens", [text.training, text.validation], text.vocab)
        overrides = make_overrides(folder / "tokens", text, arguments.steps, arguments.position)
        metrics = pretrain(folder, overrides)
    seconds = [line["seconds"] for line in metrics[1:-1]]
    emit(
        tokens_per_second=SETTINGS.tokens_per_step * len(seconds) / sum(seconds),
        best_tokens_per_second=SETTINGS.tokens_per_step / min(seconds),
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_CHILDREN),
        loss=metrics[-1]["eval_loss"],
        versions={"torch": version("torch")},
    )


if __name__ == "__main__":
    main()
