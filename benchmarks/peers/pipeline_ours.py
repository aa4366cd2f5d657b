"""megaframe on the pipeline workload."""

from __future__ import annotations

from ours_on_ranks import train
from pipeline_workload import MICROBATCHES, make_parser, make_shape


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    shape = make_shape(arguments)
    settings = [
        f"model.vocab={shape.vocab}",
        "model.tie_embeddings=false",
        "train.recompute_blocks=0",
        f"train.microbatch={shape.batch // MICROBATCHES}",
        f"parallel.pipeline={arguments.stages}",
        f"parallel.schedule={arguments.schedule}",
        f"parallel.chunks={arguments.chunks}",
        *arguments.settings,
    ]
    train(shape, "fp32", arguments.steps, arguments.stages, settings)


if __name__ == "__main__":
    main()
