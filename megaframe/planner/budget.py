"""The model and the tokens that a budget of chips and time is best spent on, with their layout.

How many tokens a budget pays for depends on the speed at which the planner trains a model of each
size there, so nothing is assumed of MFU: the size is chosen for which those tokens are as many for
each parameter as a law of scaling wants. A model is the config's, with other numbers of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaframe.config import RunConfig, TrainConfig
from megaframe.errors import UserError
from megaframe.planner.budget_request import Budget
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Cell, Explanation
from megaframe.planner.goodput import predict_goodput
from megaframe.planner.layout_search import SearchResult, find_fastest, search
from megaframe.planner.model_sizes import scale_model
from megaframe.planner.parameter_counts import count_model_parameters
from megaframe.planner.theory.scaling_laws import (
    FLOPS_PER_PARAMETER,
    LAWS,
    LossLaw,
    ScalingLaw,
    compute_batch_tokens,
    compute_learning_rate,
    compute_tokens_per_parameter,
)

_USUAL_MFU = 0.4
"""MFU from which the batch is chosen; the batch grows with the third root of the FLOPs only."""
_SIMPLE = {"context": 1, "data_replicate": 1}
"""Axes that are not tried while sizes are compared."""
_LEAST_LAYERS, _MOST_LAYERS = 2, 1000
_DIALS = (1.0, 2.0, 4.0, 8.0, 16.0)
_HEAD = (
    "law", "tokens x", "layers", "hidden", "parameters", "tokens", "tokens a parameter", "loss",
    "FLOPs",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedSize:
    """A model that the budget trains.

    Attributes:
        config: The run, without a layout.
        parameters: Of the whole model.
        tables: Those of its tables of words.
        tokens: On which the budget trains it, without failures; 0 if it fits in no layout.
    """

    config: RunConfig
    parameters: int
    tables: int
    tokens: float

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    def count_for(self, law: ScalingLaw) -> int:
        """Return the parameters as a law counts them."""
        return self.parameters if law.counts_tables else self.parameters - self.tables

    def has_enough_tokens(self, law: ScalingLaw, overtraining: float) -> bool:
        """Return whether there are as many tokens for each parameter as a law wants."""
        if not self.tokens:
            return False
        counted = self.count_for(law)
        flops = FLOPS_PER_PARAMETER * counted * self.tokens
        wanted = compute_tokens_per_parameter(law, flops, overtraining)
        return self.tokens / counted >= wanted


@dataclass
class SizeTable:
    """The sizes of a config's shape that a budget trains, by number of layers, each computed once.

    Attributes:
        config: The run, whose model has the shape.
        fixed: Values of layout keys that the search must not change.
    """

    config: RunConfig
    budget: Budget
    constants: Constants
    fixed: dict[str, Any]
    _sizes: dict[int, TrainedSize] = field(default_factory=dict)

    def compute(self, layers: int) -> TrainedSize:
        """Return the size with so many layers."""
        if layers not in self._sizes:
            self._sizes[layers] = self._compute_size(layers)
        return self._sizes[layers]

    def _compute_size(self, layers: int) -> TrainedSize:
        model = scale_model(self.config.model, layers)
        config = self.config.model_copy(update={"model": model})
        counts = count_model_parameters(model, config.train)
        fixed = {**_SIMPLE, **self.fixed}
        space = SearchSpace(config, self.budget.gpus, self.budget.cluster, fixed)
        fastest = find_fastest(space, self.constants)
        samples = 0.0
        if fastest is not None:
            samples = config.train.global_batch * self.budget.seconds / fastest[2]
        tokens = samples * config.train.seq
        return TrainedSize(config, counts.total, sum(counts.tables), tokens)

    def find_best(self, law: ScalingLaw, overtraining: float) -> TrainedSize | None:
        """Return the largest size that has as many tokens for each parameter as the law wants; None
        if the smallest has too few. Larger sizes have fewer tokens, so halving finds it."""
        if not self.compute(_LEAST_LAYERS).has_enough_tokens(law, overtraining):
            return None
        low, high = _LEAST_LAYERS, _MOST_LAYERS
        while high - low > 1:
            middle = round(math.sqrt(low * high)) if high > 1.2 * low else (low + high) // 2
            middle = min(max(middle, low + 1), high - 1)
            if self.compute(middle).has_enough_tokens(law, overtraining):
                low = middle
            else:
                high = middle
        return self.compute(low)

    def is_largest_that_fits(self, size: TrainedSize) -> bool:
        """Return whether the next larger size fits in no layout."""
        return not self.compute(size.config.model.layers + 1).tokens


@dataclass(frozen=True)
class BudgetPlan:
    """What a budget is best spent on: the run with its layouts, and why."""

    space: SearchSpace
    result: SearchResult
    explanation: Explanation


def plan_budget(
    budget: Budget,
    config: RunConfig,
    constants: Constants,
    law: tuple[str, ScalingLaw],
    *,
    overtraining: float = 1.0,
    fixed: dict[str, Any] | None = None,
    given: Sequence[str] = (),
) -> BudgetPlan:
    """Return the best run for a budget.

    Args:
        budget: Chips and time.
        config: The shape of the model, and everything but sizes.
        constants: What kernels and collectives reach there.
        law: A law of scaling with its name.
        overtraining: Tokens for each parameter, as a multiple of the law's.
        fixed: Values of layout keys that stay.
        given: Keys of the config that stay as they are.

    Raises:
        UserError: The budget is too small for any model, or no layout is valid.
    """
    if "train.global_batch" not in given:
        batch = choose_batch(config.train, budget)
        config = config.replace(train={"global_batch": batch, "batch_ramp": None})
    table = SizeTable(config, budget, constants, fixed or {})
    best = table.find_best(law[1], overtraining)
    if best is None:
        raise UserError(describe_too_little(table, law, overtraining))
    run, result = _plan_run(best, table, given)
    lines = tuple(_describe_plan(result, best, table, law, overtraining))
    rows = tuple(_list_rows(table, law))
    title = f"Budget: {budget.gpus} {budget.cluster.chip.name} for {_format_time(budget.seconds)}"
    return BudgetPlan(
        SearchSpace(run, budget.gpus, budget.cluster, fixed or {}),
        result,
        Explanation(title, lines, _HEAD, rows),
    )


def choose_batch(train: TrainConfig, budget: Budget) -> int:
    """Return a near-optimal global batch for the budget's FLOPs: as many samples as there are GPUs,
    halved or doubled repeatedly."""
    peak = budget.cluster.chip.get_sustained_flops(train.precision) or 0.0
    flops = _USUAL_MFU * peak * budget.gpus * budget.seconds
    wanted = compute_batch_tokens(flops) / train.seq if flops else train.global_batch
    batches = [budget.gpus]
    while batches[-1] % 2 == 0 and batches[-1] > wanted:
        batches.append(batches[-1] // 2)
    while batches[-1] < wanted:
        batches.append(2 * batches[-1])
    return min(batches, key=lambda samples: abs(math.log(samples / wanted)))


def _plan_run(
    best: TrainedSize, table: SizeTable, given: Sequence[str]
) -> tuple[RunConfig, SearchResult]:
    """Return the run of a size, with its steps and learning rate, and its layouts."""
    budget, space = table.budget, SearchSpace(best.config, table.budget.gpus, table.budget.cluster)
    result = search(replace(space, fixed=table.fixed), table.constants)
    prediction = result.best.prediction
    speed = prediction.tokens_per_second
    goodput = predict_goodput(
        budget.cluster, budget.gpus, speed, 1.0, float(prediction.checkpoint_bytes)
    )
    config = result.best.config
    tokens = speed * goodput.share * budget.seconds
    steps = max(1, int(tokens / (config.train.global_batch * config.train.seq)))
    optim: dict[str, object] = {"warmup": min(config.optim.warmup, max(1, steps // 50))}
    if config.optim.name == "adamw" and "optim.lr" not in given:
        learning_rate = float(f"{compute_learning_rate(best.flops):.2g}")
        optim["lr"] = learning_rate
        optim["min_lr"] = config.optim.min_lr * learning_rate / config.optim.lr
    keys: dict[str, Any] = {"train": {"steps": steps}, "optim": {**optim, "decay": None}}
    choices = tuple(
        replace(choice, config=choice.config.replace(**keys)) for choice in result.choices
    )
    return choices[0].config, replace(result, choices=choices)


def describe_too_little(table: SizeTable, law: tuple[str, ScalingLaw], overtraining: float) -> str:
    """Return the message if the budget does not train the smallest model on enough tokens: both
    numbers, and the shortest time that would."""
    smallest, budget = table.compute(_LEAST_LAYERS), table.budget
    chips = f"{budget.gpus} {budget.cluster.chip.name}"
    if not smallest.tokens:
        return (
            f"--budget: no layout of {_LEAST_LAYERS} layers fits on {chips} with "
            f"train.global_batch={table.config.train.global_batch}; use another number of chips"
        )
    counted = smallest.count_for(law[1])
    enough = next(
        times
        for times in (2.0**exponent for exponent in range(1, 60))
        if replace(smallest, tokens=smallest.tokens * times).has_enough_tokens(law[1], overtraining)
    )
    return (
        f"--budget: {chips} for {_format_time(budget.seconds)} buy nothing: the smallest model, of "
        f"{_LEAST_LAYERS} layers and {counted:,} parameters, would see {smallest.tokens:,.3g} "
        f"tokens, less than {law[0]} wants; use {chips} for "
        f"{_format_time(enough * budget.seconds)} or more, or a --config with fewer parameters "
        "(model.vocab, model.hidden)"
    )


def _describe_plan(
    result: SearchResult,
    best: TrainedSize,
    table: SizeTable,
    law: tuple[str, ScalingLaw],
    overtraining: float,
) -> Iterator[str]:
    """Yield the plan in words: what is bought, the model, its training, and the law."""
    run = result.best.config
    budget, train, model = table.budget, run.train, run.model
    tokens = train.steps * train.global_batch * train.seq
    yield _describe_purchase(budget)
    yield (
        f"Train {best.parameters:,} parameters (layers {model.layers}, hidden {model.hidden}, "
        f"heads {model.heads}, key heads {model.kv_heads}, ffn {model.ffn}) on {tokens:.4g} "
        f"tokens: {train.steps:,} steps of {train.global_batch} samples of {train.seq} tokens, "
        f"{tokens / best.parameters:.3g} tokens a parameter, after failures."
    )
    if table.is_largest_that_fits(best):
        yield (
            f"No larger model fits on {budget.gpus} {budget.cluster.chip.name}, so it has more "
            "tokens than the law wants; more chips for a shorter time would be better."
        )
    loss = law[1].compute_loss(best.count_for(law[1]), tokens)
    yield (
        f"{law[0]} ({law[1].source}): of C = 6 N D FLOPs, "
        + _describe_law(law[1])
        + (f" Here N D give {loss:.3f} nats a token." if loss is not None else "")
    )
    if overtraining != 1.0:
        yield (
            f"Over-training {overtraining:g}: that many times the tokens for each parameter, so "
            f"the model is smaller by its root, {math.sqrt(overtraining):.3g}, and cheaper to use."
        )
    yield (
        f"The batch is near 0.292 C^0.3271 tokens and the learning rate of AdamW, "
        f"{run.optim.lr:g}, near 0.3118 C^-0.125 (DeepSeek LLM, Bi et al. 2024), where the command "
        "line gives none."
    )
    yield "The table compares sizes by the speed of their best layouts, without failures."
    yield (
        f"MFU {result.best.prediction.mfu:.1%} is that of the layout below."
        if result.best.prediction.mfu is not None
        else "No peak is known for MFU."
    )


def _describe_law(law: ScalingLaw) -> str:
    if isinstance(law, LossLaw):
        return (
            f"the lowest L = {law.irreducible:g} + {law.parameter_factor:g} / "
            f"N^{law.parameter_exponent:g} + {law.token_factor:g} / D^{law.token_exponent:g} has N "
            "= (a A / b B)^(1 / (a + b)) (C / 6)^(b / (a + b))."
        )
    return f"the best N = {law.coefficient:.4g} C^{law.exponent:g}, from which no loss follows."


def _describe_purchase(budget: Budget) -> str:
    cluster = budget.cluster
    price = (
        f"${budget.dollars:,.0f} at ${cluster.price:g} an hour"
        if cluster.price
        else f"at no known price (give price in a description of {cluster.name})"
    )
    energy = (
        f"the energy of {cluster.chip.name} is not known (give watts in a description)"
        if budget.kilowatt_hours is None
        else f"{budget.kilowatt_hours:,.4g} kWh at most, {cluster.chip.watts:g} W a chip without "
        "hosts, network and cooling"
    )
    return (
        f"{budget.gpus} {cluster.chip.name} of {cluster.name} for {budget.seconds / 3600:,.4g} "
        f"hours: {budget.gpu_hours:,.0f} GPU hours, {price}; {energy}."
    )


def _list_rows(table: SizeTable, law: tuple[str, ScalingLaw]) -> Iterator[tuple[Cell, ...]]:
    """Yield what other laws want, and then what more over-training would give."""
    laws = {**LAWS, law[0]: law[1]}
    dials = [(name, 1.0) for name in sorted(laws, key=lambda name: name != law[0])]
    dials[1:1] = [(law[0], times) for times in _DIALS[1:]]
    for name, times in dials:
        size = table.find_best(laws[name], times)
        if size is None:
            continue
        model = size.config.model
        loss = laws[name].compute_loss(size.count_for(laws[name]), size.tokens)
        yield (
            name, times, model.layers, model.hidden, f"{size.parameters:.3e}", f"{size.tokens:.3e}",
            size.tokens / size.parameters, loss, f"{size.flops:.2e}",
        )  # fmt: skip


def _format_time(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds:.3g} seconds"
