"""Compares random legal runs with the same runs on one rank: `make parity-fuzz SECONDS=600`.

Two optimizer steps in fp64 must give the same losses, gradient norms and weights under every
layout. A failure is made as small as it goes, and printed as a config and the command that runs
only it.

python tests/support/parity/parity_fuzz.py --count 2000 --seed 1
python tests/support/parity/parity_fuzz.py --config failure.yaml --ranks 4   (one run again)
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import lru_cache, partial
from pathlib import Path
from unittest import SkipTest

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seed_with
from parity_runs import assert_same, run, run_with_extensions, run_with_rounded_weights
from random_runs import RandomRun, random_runs, use_examples

from megaframe.training.rank_pool import RankPool

BATCH = 50
"""Runs between two looks at the clock; each batch has a seed of its own."""
REPEATED = 20
"""Runs drawn for each one that is checked, at most. Hypothesis varies what it has drawn, and only
the first of those that show the same mechanisms is checked."""
ROUNDINGS = 8
"""How often weights are rounded otherwise to see whether that decides a result: one rounding shows
how steep a run is in one direction only."""
PLAIN_TRAIN = {"recompute", "recompute_blocks", "offload"}
"""Keys of `train` that the run on one rank does not have."""
SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    print_blob=False,
)


class ParityCheck:
    """Runs what it is given on ranks of a pool, and the same on one rank.

    A random model may be so steep that its second step differs if weights change by less than their
    rounding. Such runs show nothing, and are counted apart.

    Args:
        pool: A pool of as many ranks as a run may have.
        function: What a rank runs; tests give one with a mistake in it.
    """

    def __init__(self, pool, function=None):
        self._pool, self._function = pool, function or run
        self._run_on_one = lru_cache(maxsize=64)(self._run_on_one_rank)
        self.runs = self.decided_by_rounding = 0

    def check(self, random_run):
        """Raise an `AssertionError` if the layout changes the result."""
        self.runs += 1
        sections, flags = random_run.sections, (False, random_run.ragged, random_run.packed)
        train = {key: v for key, v in sections["train"].items() if key not in PLAIN_TRAIN}
        train["microbatch"] = 1 if random_run.ragged else train["global_batch"]
        plain = {"model": sections["model"], "train": train, "optim": sections["optim"]}
        extensions = tuple(sections.get("run", {}).get("extensions", ()))
        expected = self._run_on_one(json.dumps(plain, sort_keys=True), extensions, *flags)
        results = self._pool.run(
            random_run.ranks,
            run_with_extensions,
            extensions,
            self._function,
            *(sections["model"], sections["train"], sections["parallel"]),
            *flags,
            sections["optim"],
        )
        try:
            assert_same(results, expected)
        except AssertionError:
            if self._is_decided_by_rounding(plain, extensions, flags, expected):
                self.decided_by_rounding += 1
                return
            raise

    def _is_decided_by_rounding(self, plain, extensions, flags, expected):
        for seed in range(ROUNDINGS):
            rounded = self._run_on_one_rank(
                json.dumps(plain),
                extensions,
                *flags,
                function=partial(run_with_rounded_weights, seed=seed),
            )
            try:
                assert_same([rounded], expected)
            except AssertionError:
                return True
        return False

    def _run_on_one_rank(self, plain, extensions, *flags, function=run):
        sections = json.loads(plain)
        arguments = (sections["model"], sections["train"], {}, *flags, sections["optim"])
        return self._pool.run(1, run_with_extensions, extensions, function, *arguments)[0]


class ParityFailure(Exception):
    """A run whose layout changes the result, as small as it was found.

    Attributes:
        random_run: The run.
        error: What differs.
    """

    def __init__(self, random_run, error):
        super().__init__(f"{error}\n\n{describe(random_run)}")
        self.random_run, self.error = random_run, error


def search(check, examples, seed, end=None, ranks=8):
    """Check random runs and raise a `ParityFailure` with the smallest of those that fail.

    Args:
        check: A `ParityCheck`.
        examples: Number of runs, which show different mechanisms.
        seed: Anything from which the runs follow.
        end: When to stop, in seconds of `time.monotonic`; a failure is still made small.
        ranks: Ranks that a run has at most.
    """
    failed, shown, stop = None, set(), check.runs + examples

    @seed_with(str(seed))
    @settings(SETTINGS, max_examples=REPEATED * examples)
    @given(random_runs(ranks))
    def check_one(random_run):
        nonlocal failed
        if failed is None:
            if check.runs == stop or (end is not None and time.monotonic() > end):
                raise SkipTest  # which hypothesis does not take for a failure
            if random_run.mechanisms in shown:
                return
            shown.add(random_run.mechanisms)
        try:
            check.check(random_run)
        except Exception as error:
            failed = random_run, error
            raise

    try:
        with use_examples():
            check_one()
    except SkipTest:
        return
    except Exception as error:
        if failed is None:
            raise
        raise ParityFailure(*failed) from error


def describe(random_run):
    """Return a run as a config file, and the command that runs only it."""
    text = yaml.safe_dump(random_run.sections, sort_keys=False)
    descriptor, path = tempfile.mkstemp(suffix=".yaml", prefix="parity-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    flags = [f"--{name}" for name in ("packed", "ragged") if getattr(random_run, name)]
    program = Path(__file__).resolve().relative_to(Path(__file__).resolve().parents[3])
    command = ["python", str(program), "--config", path, "--ranks", str(random_run.ranks), *flags]
    return f"{text}\nrun only this: {' '.join(command)}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="default: 60, without --count")
    parser.add_argument(
        "--count", type=int, help="number of runs; default: as many as there is time"
    )
    parser.add_argument("--seed", default=str(int(time.time())), help="default: the time")
    parser.add_argument("--config", type=Path, help="check this run only")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of --config, or at most")
    parser.add_argument("--packed", action="store_true", help="of --config: several documents")
    parser.add_argument("--ragged", action="store_true", help="of --config: unequal lengths")
    options = parser.parse_args()
    pool = RankPool(options.ranks)
    check = ParityCheck(pool)
    try:
        if options.config is not None:
            sections = {"model": {}, "train": {}, "parallel": {}, "optim": {}}
            sections |= yaml.safe_load(options.config.read_text())
            check.check(RandomRun(options.ranks, sections, options.packed, options.ragged))
            print("the layout does not change the result")
            return 0
        print(f"seed {options.seed}", flush=True)
        seconds = options.seconds or (60.0 if options.count is None else None)
        end = None if seconds is None else time.monotonic() + seconds
        batch = 0
        while (options.count is None or check.runs < options.count) and (
            end is None or time.monotonic() < end
        ):
            left = BATCH if options.count is None else options.count - check.runs
            search(check, min(BATCH, left), f"{options.seed} {batch}", end, options.ranks)
            batch += 1
    except ParityFailure as failure:
        print(f"after {check.runs} runs: {failure}")
        return 1
    finally:
        pool.close()
    print(
        f"{check.runs} runs: no layout changed a result; {check.decided_by_rounding} are decided "
        "by rounding"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
