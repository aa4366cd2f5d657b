"""megaframe on the pipeline workload."""

from __future__ import annotations

from ours_on_ranks import train
from pipeline_workload import MICROBATCHES, make_parser, make_shape


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--schedule", default="1f1b")
    arguments.add_argument("--chunks", type=int, default=1)
    arguments.add_argument("settings", nargs="*", metavar="section.key=value")
    given = arguments.parse_args()
    shape = make_shape(given)
    settings = [
        f"model.vocab={shape.vocab}",
        "model.tie_embeddings=false",
        "train.recompute_blocks=0",
        f"train.microbatch={shape.batch // MICROBATCHES}",
        f"parallel.pipeline={given.stages}",
        f"parallel.schedule={given.schedule}",
        f"parallel.chunks={given.chunks}",
        *given.settings,
    ]
    train(shape, "fp32", given.steps, given.stages, settings)


if __name__ == "__main__":
    main()
