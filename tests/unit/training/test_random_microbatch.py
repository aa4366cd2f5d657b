"""The random microbatch that parts are measured with: parts of the same samples on all ranks."""

import pytest
import torch

from megaframe.config import RunConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.group import Ring
from megaframe.training.random_microbatch import make_random_microbatch

CPU = torch.device("cpu")
SEQ = 24


def make(parts, index, **sections):
    config = RunConfig(train={"seq": SEQ, "microbatch": 3, "global_batch": 3}, **sections)
    context, documents = ContextParallel(ring=Ring(index, parts)), config.data.reset_attention
    return make_random_microbatch(config.model, config.train, context, CPU, documents=documents)


@pytest.mark.parametrize("parts", [2, 3])
def test_context_ranks_have_parts_of_the_same_random_samples(parts):
    """Together they have every token and label of the rank that has whole samples, once."""
    model = {"model": {"vocab": 32000}}
    whole = make(1, 0, **model)
    divided = [make(parts, index, **model) for index in range(parts)]
    for name in ("tokens_BS", "labels_BS"):
        tokens_BS = torch.cat([getattr(part, name) for part in divided], 1)
        assert torch.equal(tokens_BS.sort(1).values, getattr(whole, name).sort(1).values)
    assert whole.sum_label_weights() == 3 * SEQ
    assert sum(part.sum_label_weights() for part in divided) == 3 * SEQ


def test_tokens_are_words_of_the_vocabulary():
    """They use all of a small one, and labels are not copies of the tokens."""
    microbatch = make(1, 0, model={"vocab": 7})
    assert set(microbatch.tokens_BS.flatten().tolist()) == set(range(7))
    assert not torch.equal(microbatch.tokens_BS, microbatch.labels_BS)


def test_it_has_what_a_run_of_this_config_has():
    """Documents where attention stops at them, and the tokens ahead that the model predicts."""
    assert make(1, 0).documents_BS is None and make(1, 0).ahead == ()
    microbatch = make(1, 0, model={"mtp_depth": 2}, data={"reset_attention": True})
    assert microbatch.documents_BS.shape == (3, SEQ)
    for by, ahead in enumerate(microbatch.ahead, 1):
        assert torch.equal(ahead.labels_BS[:, :-by], microbatch.labels_BS[:, by:])
        assert (ahead.labels_BS[:, -by:] == IGNORE).all()
    assert len(microbatch.ahead) == 2
