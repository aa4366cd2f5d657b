"""The small configs and layouts under which the layers of a config are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from megaframe.architecture.model_blocks import describe_block
from megaframe.config import ModelConfig, OptimConfig, RunConfig, RunSection
from megaframe.training.layer_check.measure import list_expert_sets
from megaframe.validate.run import find_mistakes

_VOCAB, _SAMPLES, _TOKENS = 37, 2, 16
_MOST_TOKENS = 4096
"""Tokens of a sample at most, if all sets of experts are to be chosen equally often."""
_DISPATCH = ("all_to_all", "all_gather", "hierarchical", "deduplicated")


@dataclass(frozen=True)
class CheckedLayout:
    """A layout to check.

    Attributes:
        name: The keys that are not the default.
        config: The small config with this layout.
        ranks: Number of ranks.
        refusal: Why it cannot run; empty if it can.
    """

    name: str
    config: RunConfig
    ranks: int
    refusal: str


class SmallRun:
    """A run with all kinds of blocks of another one, of which it is given the sections, and little
    of everything else."""

    def __init__(self, model: ModelConfig, optim: OptimConfig, run: RunSection) -> None:
        self._tokens, moe = _TOKENS, model.moe
        self._model = model.model_copy(update=_choose_sizes(model))
        if moe is not None:
            self._tokens = min(_MOST_TOKENS, lcm(8, len(list_expert_sets(moe.experts, moe.top_k))))
            small = moe.model_copy(update={"capacity": None})
            self._model = self._model.model_copy(update={"moe": small})
        # Keys under which a layout may change the answer are not those of the run.
        rates = {"lr": 0.01, "min_lr": 0.0, "warmup": 2, "offload": False, "state": "master"}
        rates |= {"name": "adamw"} if optim.name in ("lion", "muon") else {}
        self._optim, self._run = optim.model_copy(update=rates), run

    def list_measured_layouts(self) -> list[CheckedLayout]:
        """Return the layouts under which layers are measured, each with every kind of recompute."""
        sizes: list[dict[str, object]] = [
            {},
            {"tensor": 2},
            {"context": 2},
            {"context": 2, "context_kind": "all_to_all"},
        ]
        if self._model.moe is not None:
            nodes = {"node_size": 1}
            sizes += [{"data": 2, "expert": 2, "dispatch": each, **nodes} for each in _DISPATCH]
            sizes.append({"data": 2, "expert_tensor": 2})
        return [
            self._make_layout(parallel, {"precision": "bf16", "recompute": recompute}, _SAMPLES)
            for parallel in sizes
            for recompute in ("none", "selective", "full")
        ]

    def list_parity_layouts(self) -> list[CheckedLayout]:
        """Return the layouts that are compared with one rank, which is the first of them."""
        sizes: list[dict[str, object]] = [
            {},
            {"tensor": 2},
            {"context": 2},
            {"context": 2, "context_kind": "all_to_all"},
            {"pipeline": 2},
            {"data": 2, "zero": 0},
            {"data": 2, "zero": 3},
        ]
        if self._model.moe is not None:
            sizes += [{"data": 2, "expert": 2}, {"data": 2, "expert_tensor": 2}]
        precision = {"precision": "fp64", "steps": 4}
        layouts = [self._make_layout(parallel, precision, 1) for parallel in sizes]
        return [*layouts, self._make_layout({}, {**precision, "recompute": "selective"}, 1)]

    def _make_layout(
        self, parallel: Mapping[str, object], train: Mapping[str, object], samples: int
    ) -> CheckedLayout:
        ranks, sizes = 2 if parallel else 1, {"microbatch": samples, "global_batch": 4}
        config = RunConfig.model_validate(
            {
                "model": self._model,
                "train": {**train, "seq": self._tokens, **sizes},
                "parallel": parallel,
                "optim": self._optim,
                "kernels": {"matmul": "torch"},
                "run": self._run,
            }
        )
        keys = {f"parallel.{key}": value for key, value in parallel.items()}
        if "recompute" in train:
            keys["train.recompute"] = train["recompute"]
        name = " ".join(f"{key}={value}" for key, value in keys.items()) or "one rank"
        refusal = "; ".join(find_mistakes(config, ranks, data=False))
        return CheckedLayout(name, config, ranks, refusal)


def _choose_sizes(model: ModelConfig) -> dict[str, object]:
    """Return the vocabulary, and the fewest layers that have all kinds of blocks."""
    kinds = [describe_block(model, layer) for layer in range(model.layers)]
    fewest = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    pattern = 1 if model.blocks is None else sum(block.repeat for block in model.blocks)
    return {"vocab": _VOCAB, "layers": min(model.layers, max(2, fewest, pattern))}
