"""A run whose layout changes at each start, because it gets fewer or more ranks."""

from entry_runs import read_losses
from fault_runs import main
from tolerances import promised


def test_a_run_loses_ranks_and_gets_them_back(pool, overrides, tmp_path):
    keys = {"train__steps": 6, "train__microbatch": 1, "optim__schedule": "constant"}
    keys |= {"checkpoint__every": 2, "parallel__pipeline": 2, "faults__elastic": True}
    assert pool.run(4, main, overrides(run__dir=tmp_path / "whole", **keys)) == [0] * 4
    for ranks, steps in ((4, 2), (3, 4), (1, 5), (4, 6)):
        options = {"train__steps": steps, "checkpoint__resume": "latest"}
        assert pool.run(ranks, main, overrides(**{**keys, **options})) == [0] * ranks
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))
