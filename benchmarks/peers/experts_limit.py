"""The limit of a layer of experts: its matrix products alone, each by the fastest routine here.

Every expert has the mean number of rows. A pass multiplies them by both matrices forward, and by
both for the gradients of the rows and of the matrices; the router's products are left out. What is
left of a pass beside them is all that a layer can save.
"""

from __future__ import annotations

import math
from importlib.metadata import version

import torch
from experts_workload import SHAPES, make_parser, read_peak_bytes, report
from product_limit import measure_seconds


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    shape = SHAPES[arguments.shape]
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    rows = shape.tokens * shape.top_k // shape.experts
    seconds = 0.0
    for inputs, outputs in ((shape.hidden, 2 * shape.width), (shape.width, shape.hidden)):
        for M, K, N in ((rows, inputs, outputs), (rows, outputs, inputs), (outputs, rows, inputs)):
            left = torch.randn(1, M, K).to(dtype)
            right = torch.randn(1, N, K).to(dtype).mT
            seconds += shape.experts * measure_seconds(left, right, 4 * arguments.steps)
    # No layer is computed, so there is no answer.
    report(shape, [seconds], read_peak_bytes(), math.nan, {"torch": version("torch")})


if __name__ == "__main__":
    main()
