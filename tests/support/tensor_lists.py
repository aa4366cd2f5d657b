"""Names and shapes of the tensors of published folders, written as patterns:
`model.layers.{0-2,5}.mlp.experts.{0-7}.up_proj.weight` stands for 32 names."""

import re
from itertools import product


def expand_range(text):
    """Return the numbers of a list of ranges."""
    spans = (span.split("-") for span in text.split(","))
    return [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]


def expand_names(pattern):
    """Yield the names that a pattern stands for."""
    fixed = re.split(r"\{.*?\}", pattern)
    ranges = [expand_range(text) for text in re.findall(r"\{(.*?)\}", pattern)]
    for numbers in product(*ranges):
        yield "".join(f"{text}{n}" for text, n in zip(fixed, numbers, strict=False)) + fixed[-1]


def expand_tensors(patterns):
    """Return the shape of each tensor by name."""
    tensors = {}
    for pattern, shape in patterns.items():
        names = dict.fromkeys(expand_names(pattern), tuple(shape))
        assert not tensors.keys() & names.keys(), pattern
        tensors |= names
    return tensors
