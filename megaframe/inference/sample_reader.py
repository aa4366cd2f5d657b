"""Computes the streams of the last tokens of samples that grow together.

One pass computes the next token of all samples whose keys and values, or states, are kept. A sample
that is new is read once, and joins the others. Models with mixers from outside that keep nothing,
and samples that have grown beyond what the model sees, are read again for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaframe.architecture.model_blocks import count_mixers, list_mixers
from megaframe.data.microbatch import Microbatch
from megaframe.model.key_value_cache import KeyValueCache, join_caches
from megaframe.pipeline_parallel.stage import Stage


@dataclass
class _Group:
    """Samples that one pass computes.

    Attributes:
        numbers: Of each.
        cache: Of all tokens of each but the last.
    """

    numbers: list[int]
    cache: KeyValueCache


class SampleReader:
    """Reads samples of one model.

    Args:
        stage: The whole model.
        context: Number of last ids of a sample that the model sees.
    """

    def __init__(self, stage: Stage, context: int) -> None:
        self._stage, self._context = stage, context
        self._device = stage.parameters()[0].value.device
        self._keeps_tokens = True
        self._groups: dict[int, _Group] = {}
        rotations = [mixer.rotary for mixer in list_mixers(stage.config.model)]
        # Above these, each further token changes how all keys are rotated.
        self._longest = min(
            rotary.scaling.original_length
            if rotary is not None and rotary.scaling.kind == "dynamic"
            else context
            for rotary in rotations
        )
        # Sample lengths above which keys are rotated otherwise, those of a cache too.
        self._limits = {
            rotary.scaling.original_length
            for rotary in rotations
            if rotary is not None and rotary.scaling.kind == "longrope"
        }

    def compute_last(self, samples: Mapping[int, Sequence[int]]) -> Tensor:
        """Return the stream of the last id of each sample, [samples, hidden].

        Args:
            samples: All ids of each, by its number. Those of the call before have one more id;
                others are new, or have ended.
        """
        streams = self._read_kept(samples)
        fresh = [number for number in samples if number not in streams]
        for number in fresh:
            if number not in streams and self._can_keep(samples[number]):
                streams |= self._read_new(samples, number, fresh)
        by_length: dict[int, list[int]] = {}
        for number in fresh:
            if number not in streams:
                size = min(len(samples[number]), self._context)
                by_length.setdefault(size, []).append(number)
        for size, numbers in by_length.items():
            seen = [samples[number][-size:] for number in numbers]
            streams |= zip(numbers, self._run(seen), strict=True)
        return torch.stack([streams[number] for number in samples])

    def _can_keep(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens of a sample stay at their positions."""
        return self._keeps_tokens and len(ids) <= min(self._context, self._longest)

    def _find_group(self, ids: Sequence[int]) -> int | None:
        """Return which samples can be computed with this one; None for none."""
        if not self._can_keep(ids):
            return None
        return sum(limit < len(ids) for limit in self._limits)

    def _read_kept(self, samples: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Return the streams of the samples that are kept, and drop what is no longer needed."""
        streams: dict[int, Tensor] = {}
        for name, group in [*self._groups.items()]:
            kept = [
                place
                for place, number in enumerate(group.numbers)
                if number in samples and self._find_group(samples[number]) == name
            ]
            if not kept:
                del self._groups[name]
                continue
            if len(kept) < len(group.numbers):
                group.numbers = [group.numbers[place] for place in kept]
                group.cache = join_caches([(group.cache, kept)])
            kept_ids = [samples[number] for number in group.numbers]
            streams |= zip(group.numbers, self._run(kept_ids, group.cache), strict=True)
        return streams

    def _read_new(
        self, samples: Mapping[int, Sequence[int]], number: int, fresh: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return the stream of a sample and of those that equal it, which join the others."""
        ids, cache = samples[number], KeyValueCache(count_mixers(self._stage.config.model))
        (stream,) = self._run([ids], cache)
        alike = [other for other in fresh if samples[other] == ids]
        name = self._find_group(ids)
        if name is not None:
            group = self._groups.get(name)
            if group is not None:
                places = range(len(group.numbers))
                cache = join_caches([(group.cache, places), (cache, [0] * len(alike))])
            elif len(alike) > 1:
                cache = join_caches([(cache, [0] * len(alike))])
            self._groups[name] = _Group([*(group.numbers if group else ()), *alike], cache)
        return dict.fromkeys(alike, stream)

    def _run(self, samples: Sequence[Sequence[int]], cache: KeyValueCache | None = None) -> Tensor:
        """Return the stream of the last id of each sample.

        Args:
            samples: Of one length, or those of a cache with one more id each.
            cache: To fill or to go on from.
        """
        has_past = cache is not None and cache.length > 0
        new = [ids[-1:] for ids in samples] if has_past else samples
        tokens_BS = torch.tensor(new, device=self._device)
        numbers_B = torch.arange(len(new), device=self._device)
        microbatch = Microbatch(tokens_BS, tokens_BS, numbers_B)
        if has_past:
            lengths = [len(ids) for ids in samples]
            positions_B1 = torch.tensor(lengths, device=self._device)[:, None] - 1
            microbatch = replace(microbatch, positions_BS=positions_B1, whole=max(lengths))
        hidden = self._stage.compute_hidden(microbatch, cache=cache).unflatten(0, (len(new), -1))
        if cache is not None and not cache.advance(tokens_BS.shape[1]):
            self._keeps_tokens = False
        return hidden[:, -1]
