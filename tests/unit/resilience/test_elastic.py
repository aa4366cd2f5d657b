"""A layout for the ranks that are left."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.resilience.elastic import fit_layout
from megaframe.validate.run import find_mistakes, validate_config

sizes = st.sampled_from([1, 2, 4])


def make_config(tensor=1, pipeline=1, data=None, batch=16, **parallel):
    return RunConfig(
        model={"layers": 8, "hidden": 32, "heads": 4, "vocab": 64},
        train={"seq": 16, "global_batch": batch, "microbatch": 1},
        parallel={"tensor": tensor, "pipeline": pipeline, "data": data, **parallel},
        data={"sources": [{"path": "x"}]},
    )


@given(tensor=sizes, pipeline=sizes, data=sizes, lost=st.integers(0, 31))
def test_what_fits_is_valid_and_as_near_as_can_be(tensor, pipeline, data, lost):
    requested = make_config(tensor, pipeline, data)
    world = tensor * pipeline * data
    assume(lost < world)
    fitted, used = fit_layout(requested, world - lost)
    validate_config(fitted, used)
    assert 1 <= used <= world - lost
    assert fitted.train.global_batch == requested.train.global_batch
    if not lost:
        assert fitted is requested
    if world - lost >= tensor * pipeline:
        assert (fitted.parallel.tensor, fitted.parallel.pipeline) == (tensor, pipeline)
        spare = (world - lost) // (tensor * pipeline)
        per_replica = used // fitted.parallel.data
        assert all(find_mistakes(make_config(tensor, pipeline, larger), per_replica * larger)
                   for larger in range(fitted.parallel.data + 1, spare + 1))  # fmt: skip


def test_more_ranks_are_used_and_other_axes_follow():
    assert fit_layout(make_config(2, 2, 2), 16)[0].parallel.data == 4
    fitted, used = fit_layout(make_config(data=8, data_replicate=4), 6)
    assert used == 4 and fitted.parallel.data_replicate == 4
    fitted, used = fit_layout(make_config(pipeline=4, layers_per_stage=(1, 3, 2, 2)), 3)
    assert used == 2 and fitted.parallel.layers_per_stage is None


def test_what_no_number_of_ranks_mends_is_said():
    with pytest.raises(UserError, match=r"(?s)found no layout for 3 ranks.*data\.split"):
        fit_layout(make_config().model_copy(update={"data": make_config().data.model_copy(
            update={"split": (0.0, 1.0, 0.0)})}), 3)  # fmt: skip
