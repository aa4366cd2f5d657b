"""Tasks of lm-evaluation-harness during training, answered by all ranks of any layout.

The harness runs on one rank, the first that has the model's head. For each pass it sends the tokens
to all others, which wait for the next pass until it says that there is none. The ranks that have
different samples divide the windows of a pass.

Shape suffixes: W windows, S inputs of a window, L counted labels of all windows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megaframe.config import EvaluateConfig, RunConfig, TrainConfig
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.tokenizer import import_library
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.inference.chat import ChatFormat, find_chat_format
from megaframe.inference.evaluation import Score, TokenSequence, score_by
from megaframe.inference.generation import SampledIds, SampleRequest, load_run_tokenizer, sample_by
from megaframe.metrics import MetricsLogger
from megaframe.training.text_windows import pad_windows, split_windows, stack_ends
from megaframe.training.train_step import TrainStep

if TYPE_CHECKING:
    from megaframe.inference.lm_eval import TaskOptions

_END, _SCORE, _PREDICT = 0, 1, 2
_NO_SCORE = "sample_len"
"""What the harness counts beside its metrics."""


class TaskEvaluator:
    """Scores a run on the tasks of `evaluate.tasks`. All ranks call it at the same steps.

    Args:
        config: The run.
        mesh: This rank's groups.
        train_step: Runs the passes.

    Raises:
        UserError: The harness is not installed or does not know a task, or there is no tokenizer
            that fits.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, train_step: TrainStep) -> None:
        self._evaluate, self._mesh = config.evaluate, mesh
        self._passes = _TaskPasses(config.train, mesh, train_step)
        self._tokenizer = load_run_tokenizer(config.data, config.model)
        self._chat: ChatFormat | None = None
        if config.evaluate.chat:
            self._chat = find_chat_format(config.data.tokenizer, self._tokenizer)
        coordinate = mesh.coordinate
        self._is_driver = coordinate["pipeline"] == train_step.rank_of[-1] and not any(
            coordinate[axis] for axis in ("tensor", "context", "data")
        )
        if self._is_driver:
            try:
                import_library("lm_eval", "evaluate")
                from megaframe.inference.lm_eval import find_tasks  # imports the harness

                find_tasks(self._make_options())
                self._passes.end()
            except UserError as error:
                self._passes.end({"error": f"evaluate.tasks: {error}"})
                raise UserError(f"evaluate.tasks: {error}") from None
        elif error_text := self._passes.serve().get("error"):
            raise UserError(str(error_text))

    def evaluate(self, logger: MetricsLogger, step: int) -> dict[str, float]:
        """Record the metrics of all tasks. Returns what is recorded, which is the same on all
        ranks. If the harness fails, a line says so, and nothing is recorded."""
        result = self._run_harness() if self._is_driver else self._passes.serve()
        if error := result.pop("error", None):
            logger.note(f"warning: step {step}: no scores of evaluate.tasks: {error}")
        values = {name: float(value) for name, value in result.items()}
        for name, value in values.items():
            logger.record(name, value, "last")
        return values

    def _run_harness(self) -> dict[str, float | str]:
        """Run the harness on this rank, and tell the others its result."""
        from megaframe.inference.lm_eval import evaluate_tasks  # imports the harness

        try:
            options = self._make_options()
            scores = evaluate_tasks(self._passes, self._tokenizer, options, self._chat)
        except Exception as error:  # the others wait for an end, and the run goes on
            result: dict[str, float | str] = {"error": f"{type(error).__name__}: {error}"}
        else:
            result = {
                f"eval_tasks/{task}/{name.removesuffix(',none')}": float(value)
                for task, metrics in scores.items()
                for name, value in metrics.items()
                if isinstance(value, float | int) and "stderr" not in name and name != _NO_SCORE
            }
        self._passes.end(result)
        return result

    def _make_options(self) -> TaskOptions:
        from megaframe.inference.lm_eval import TaskOptions

        keys: EvaluateConfig = self._evaluate
        return TaskOptions(keys.tasks, keys.folder, keys.shots, keys.limit)


class _TaskPasses:
    """Passes of a model that is divided over the ranks of a run: the `TaskModel` of one rank, and
    what all others do meanwhile."""

    def __init__(self, train: TrainConfig, mesh: Mesh, train_step: TrainStep) -> None:
        self._train, self._mesh, self._train_step = train, mesh, train_step
        # The ranks that divide the windows; their copies do the same.
        self._shards = mesh.layout.data_shard
        self._shard = mesh.coordinate["data"] % self._shards

    def score(self, passages: Sequence[TokenSequence]) -> list[Score]:
        """Return the score of each passage."""
        context = self._train.seq
        batch = self._train.microbatch * self._shards
        return score_by(self._score, passages, context=context, stride=context, batch=batch)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[SampledIds]:
        """Yield samples as each gets a new id."""
        return sample_by(self._predict, requests, batch=self._train.microbatch)

    def end(self, result: Mapping[str, object] | None = None) -> None:
        """Let the other ranks go on, with the result of what this one did."""
        content = torch.frombuffer(bytearray(json.dumps(result or {}).encode()), dtype=torch.uint8)
        self._send(_END, content[None].long())

    def serve(self) -> dict[str, float | str]:
        """Take part in all passes that another rank runs. Returns the result that it ends with."""
        while True:
            kind, rows = self._receive()
            if kind == _END:
                content: dict[str, float | str] = json.loads(bytes(rows[0].tolist()))
                return content
            tokens, labels = rows.chunk(2)
            if kind == _SCORE:
                self._compute_scores(tokens, labels)
            else:
                self._compute_predictions(tokens, labels)

    def _score(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        tokens = pad_windows(microbatch.tokens_BS, self._train.seq, 0)
        labels = pad_windows(microbatch.labels_BS, self._train.seq, IGNORE)
        self._send(_SCORE, torch.cat((tokens, labels)))
        scores = self._compute_scores(tokens, labels)
        assert scores is not None, "the rank that runs the harness has the head"
        return scores

    def _predict(self, samples: Mapping[int, Sequence[int]]) -> Tensor:
        tokens, labels = stack_ends(samples.values(), self._train.seq)
        self._send(_PREDICT, torch.cat((tokens, labels)))
        logits = self._compute_predictions(tokens, labels)
        assert logits is not None, "the rank that runs the harness has the head"
        return logits.cpu()

    def _compute_scores(self, tokens_WS: Tensor, labels_WS: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the scores of all labels in order."""
        places_WS = torch.full_like(labels_WS, IGNORE)
        counted = labels_WS != IGNORE
        labels_L = labels_WS[counted]
        places_WS[counted] = torch.arange(len(labels_L))
        size = self._train.microbatch
        share = -(-len(tokens_WS) // (self._shards * size)) * size
        own = slice(self._shard * share, (self._shard + 1) * share)
        microbatches = self._make_microbatches(tokens_WS[own], places_WS[own], share)
        return self._train_step.score(microbatches, labels_L.to(self._mesh.device))

    def _compute_predictions(self, tokens_WS: Tensor, rows_WS: Tensor) -> Tensor | None:
        microbatches = self._make_microbatches(tokens_WS, rows_WS, len(tokens_WS))
        return self._train_step.predict(microbatches, len(tokens_WS))

    def _make_microbatches(
        self, tokens_WS: Tensor, labels_WS: Tensor, rows: int
    ) -> list[Microbatch]:
        """Return windows as microbatches of at most `train.microbatch` samples, with as many
        windows without a label added as there are less than `rows`."""
        missing = rows - len(tokens_WS)
        tokens = torch.cat((tokens_WS, tokens_WS.new_zeros(missing, tokens_WS.shape[1])))
        labels = torch.cat((labels_WS, labels_WS.new_full((missing, labels_WS.shape[1]), IGNORE)))
        return split_windows(tokens, labels, self._train.microbatch, self._mesh.device)

    def _send(self, kind: int, rows: Tensor) -> None:
        """Send what all others receive. rows: int64 [R, N]."""
        world, device = self._mesh.world, self._mesh.device
        all_reduce(torch.tensor([kind, *rows.shape], device=device), world).wait()
        all_reduce(rows.to(device), world).wait()

    def _receive(self) -> tuple[int, Tensor]:
        """Return the kind and the rows that the rank with the harness sends."""
        world, device = self._mesh.world, self._mesh.device
        head = all_reduce(torch.zeros(3, dtype=torch.int64, device=device), world).wait()
        kind, *shape = head.tolist()
        rows = all_reduce(torch.zeros(shape, dtype=torch.int64, device=device), world).wait()
        return kind, rows.cpu()
