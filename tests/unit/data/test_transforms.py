"""Transforms of samples: the same on any number of ranks, read ahead or not, resumed or not."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from loader_runs import make_config, take, write_sources

from megaframe.config.parts import DataTransformPart
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.data.transforms import make_generator
from megaframe.errors import UserError


class Noise(DataTransformPart):
    """Replaces tokens at random, and masks their labels."""

    kind: Literal["noise"] = "noise"
    rate: float = 0.5
    everywhere: bool = False

    def transform(self, sample, random):
        hit = random.random(len(sample.tokens)) < self.rate
        tokens = np.where(hit, random.integers(0, 65536, len(hit)), sample.tokens)
        return replace(sample, tokens=tokens, labels=np.where(hit, IGNORE, sample.labels))

    def includes_validation(self):
        return self.everywhere


class Numbered(DataTransformPart):
    """Tells by its tokens what a sample says of itself."""

    kind: Literal["numbered"] = "numbered"

    def transform(self, sample, random):
        labels = sample.documents.copy()
        labels[-2:] = sample.number, sample.next_token
        return replace(sample, labels=labels)


class Wrong(DataTransformPart):
    kind: Literal["wrong"] = "wrong"
    how: str

    def transform(self, sample, random):
        match self.how:
            case "nothing":
                return None
            case "short":
                return replace(sample, tokens=sample.tokens[1:])
            case "type":
                return replace(sample, labels=sample.labels.astype(np.int32))
            case "token":
                return replace(sample, tokens=np.full_like(sample.tokens, 65536))
            case "label":
                return replace(sample, labels=np.full_like(sample.labels, -2))
        return 1 // 0


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


def list_samples(loaders, steps):
    """Return (number, tokens, labels) of each sample of the next steps of all ranks, in order."""
    samples = []
    for loader in loaders:
        for batch in take(loader, steps):
            for part in batch.microbatches:
                rows = zip(part.samples_B.tolist(), part.tokens_BS, part.labels_BS, strict=True)
                samples += [(n, t.tolist(), y.tolist()) for n, t, y in rows]
    return sorted(samples)


def list_of_ranks(config, ranks, steps):
    loaders = [Loader(config, rank, ranks) for rank in range(ranks)]
    samples = list_samples(loaders, steps)
    for loader in loaders:
        loader.close()
    return samples


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_are_those_of_one_rank(ranks, prefetch, paths):
    transforms = (Noise(), Noise(rate=0.2))
    expected = list_of_ranks(make_config(paths, transforms=transforms), 1, 3)
    config = make_config(paths, transforms=transforms, prefetch=prefetch)
    assert list_of_ranks(config, ranks, 3) == expected
    plain = list_of_ranks(make_config(paths), 1, 3)
    changed = [
        t != u
        for (_, ts, _), (_, us, _) in zip(expected, plain, strict=True)
        for t, u in zip(ts, us, strict=True)
    ]
    assert 0.4 < np.mean(changed) < 0.8  # 1 - 0.5 * 0.8


def test_a_resumed_loader_continues_with_the_same_samples(paths):
    config = make_config(paths, transforms=(Noise(),), prefetch=2)
    whole = list_of_ranks(config, 1, 5)
    first = Loader(config, 0, 1)
    begun = list_samples([first], 2)
    state = first.state
    first.close()
    second = Loader(config, 0, 1)
    second.load(state)
    assert begun + list_samples([second], 3) == whole
    second.close()


def test_valid_tokens_are_counted_after_transforms(paths):
    (batch,) = take(Loader(make_config(paths, transforms=(Noise(rate=1.0),)), 0, 1), 1)
    assert batch.valid == 0


def test_random_numbers_differ_by_seed_sample_and_place():
    draws = {
        (seed, number, place): tuple(make_generator(seed, number, place).integers(0, 2**60, 4))
        for seed in (1, 2, 2**63 - 1)
        for number in (0, 1, 2**40)
        for place in (0, 1)
    }
    assert len({*draws.values()}) == len(draws)
    assert draws[1, 0, 0] == tuple(make_generator(1, 0, 0).integers(0, 2**60, 4))


def test_a_sample_knows_its_number_documents_and_next_token(paths):
    plain = list_of_ranks(make_config(paths, mask_eod=False), 1, 2)
    numbered = list_of_ranks(make_config(paths, transforms=(Numbered(),)), 1, 2)
    for (number, tokens, labels), (_, _, facts) in zip(plain, numbered, strict=True):
        assert facts[-2:] == [number, labels[-1]]
        # Tokens of a source count up through its documents, which are equally long.
        length = (13, 40, 7)[tokens[0] // 10_000]
        documents = np.array(tokens[:-2]) % 10_000 // length
        assert (np.diff(facts[:-2]) == np.diff(documents)).all()


def test_validation_is_left_as_it_is_unless_a_transform_includes_it(paths):
    def list_validation(seed, *transforms):
        config = make_config(paths, transforms=transforms, train={"eval_every": 1})
        run = config.run.model_copy(update={"seed": seed})
        loader = Loader(config.model_copy(update={"run": run}), 0, 1)
        batches = [batch for _, batch, _ in loader.iterate_validation(6)]
        return [(t.tokens_BS.tolist(), t.labels_BS.tolist()) for t in batches]

    plain = list_validation(1)
    assert list_validation(1, Noise()) == plain
    included = list_validation(1, Noise(everywhere=True))
    assert included != plain and list_validation(2, Noise(everywhere=True)) == included


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", r"transform returns NoneType, not a Sample"),
        ("short", r"its tokens have shape \[7\]; return \[8\], as many as before"),
        ("type", r"its labels are no array of int64"),
        ("token", r"tokens\[0\] is 65536, but model.vocab=65536 allows 0 to 65535"),
        ("label", r"labels\[0\] is -2, but model.vocab=65536 allows 0 to 65535, and -100 for"),
        ("error", r"test_transforms.py:\d+: ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_transform_does_wrong_is_said_with_the_sample(how, message, prefetch, paths):
    config = make_config(paths, transforms=(Noise(rate=0), Wrong(how=how)), prefetch=prefetch)
    loader = Loader(config, 0, 1)
    with pytest.raises(UserError, match=r"data.transforms\[1\]=wrong: sample 0: .*" + message):
        loader.next()
    loader.close()
