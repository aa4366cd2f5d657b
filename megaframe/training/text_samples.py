"""Samples of text during training: what the model makes of a few prompts, whatever its layout.

All ranks run the same forward passes, as an evaluation does, one for each new token over the whole
text so far. One rank chooses the token and tells all others, so ranks cannot come apart, even if
their sums differ in a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from megaframe.config import RunConfig
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.extensions.sink import TextSample
from megaframe.inference.generation import SamplingOptions, encode_prompt, load_run_tokenizer
from megaframe.training.text_windows import split_windows, stack_ends
from megaframe.training.train_step import TrainStep

_NO_TOKEN = -1


class TextSampler:
    """Continues the prompts of `train.sample_prompts`. All ranks call it at the same steps.

    Args:
        config: The run.
        mesh: This rank's groups.
        train_step: Runs the passes.

    Raises:
        UserError: The tokenizer does not fit the model, or a prompt is not usable.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, train_step: TrainStep) -> None:
        train = config.train
        self._config, self._mesh, self._train_step = config, mesh, train_step
        self._tokenizer = load_run_tokenizer(config.data, config.model)
        self._starts = [
            # An empty prompt begins a new document.
            encode_prompt(
                self._tokenizer, prompt or None, train.seq, f"train.sample_prompts[{number}]"
            )
            for number, prompt in enumerate(train.sample_prompts)
        ]
        self._options = SamplingOptions(temperature=train.sample_temperature)
        coordinate = mesh.coordinate
        self._is_first = not any(coordinate[axis] for axis in ("tensor", "context", "data"))

    def sample(self, step: int) -> list[TextSample]:
        """Return a text for each prompt, the same on all ranks. A text ends where the model ends
        the document, or gives numbers that are not finite.

        Args:
            step: The last step; each step draws other random numbers.
        """
        texts = [list(start) for start in self._starts]
        growing = list(range(len(texts)))
        generators = [self._make_generator(step, number) for number in growing]
        for _ in range(self._config.train.sample_tokens):
            if not growing:
                break
            chosen = self._choose_next(texts, growing, generators)
            for number in growing:
                if chosen[number] != _NO_TOKEN:
                    texts[number].append(chosen[number])
            ends = (_NO_TOKEN, self._tokenizer.eod)
            growing = [number for number in growing if chosen[number] not in ends]
        prompts = self._config.train.sample_prompts
        return [
            TextSample(prompt, self._decode(ids, len(start)))
            for prompt, ids, start in zip(prompts, texts, self._starts, strict=True)
        ]

    def _choose_next(
        self,
        texts: Sequence[Sequence[int]],
        growing: Sequence[int],
        generators: Sequence[torch.Generator],
    ) -> list[int]:
        """Return the next id of each text, `_NO_TOKEN` if there is none.

        Args:
            texts: The ids of all texts.
            growing: The numbers of those that are continued.
            generators: Of each text.
        """
        device = self._mesh.device
        train = self._config.train
        microbatches = split_windows(*stack_ends(texts, train.seq), train.microbatch, device)
        logits_PV = self._train_step.predict(microbatches, len(texts))
        chosen = torch.zeros(len(texts), dtype=torch.float64)
        if self._is_first and logits_PV is not None:
            # A model may have more ids than the tokenizer.
            logits_PV = logits_PV[:, : self._tokenizer.vocab_size].cpu()
            for number in growing:
                try:
                    chosen[number] = self._options.choose(logits_PV[number], generators[number])
                except UserError:  # not finite; the run's own checks say more than this
                    chosen[number] = _NO_TOKEN
        total = all_reduce(chosen.to(device), self._mesh.world).wait()
        return [int(value) for value in total.tolist()]

    def _make_generator(self, step: int, number: int) -> torch.Generator:
        """Return what draws the choices of a text: its own for each step, so that a text depends on
        no other."""
        name = f"{self._config.run.seed}/{step}/{number}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)

    def _decode(self, ids: Sequence[int], start: int) -> str:
        """Return the text after the first `start` ids."""
        # Decoded as a whole, because tokenizers leave out the space before a first word.
        prompt, text = self._tokenizer.decode(ids[:start]), self._tokenizer.decode(ids)
        return (
            text[len(prompt) :] if text.startswith(prompt) else self._tokenizer.decode(ids[start:])
        )
