"""Runs programs of the project on changed inputs, each in a forked child: `make fuzz SECONDS=600`.

There are three good outcomes: an answer, an error of one message with status 2, and a refusal by a
limit (which is such an error too). Everything else is a finding: a traceback, a death, more than
`SECONDS` or `BYTES`, a program started, something written outside of the working folder, and a
secret or an escape sequence in what is printed or written.

python tests/support/fuzz/fuzz.py --seconds 600 --seed 1
python tests/support/fuzz/fuzz.py --seed 1 --target goodput --case 17   (one input again)
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", COLUMNS="200")

import gc

import mutators
from targets import ROOT, list_targets

from megaframe.errors import report_errors

SECONDS, HANGING, BYTES, FILE_BYTES = 10, 20, 2 << 30, 1 << 28
"""Limits of one input: seconds of a processor, seconds by the clock (others may be busy), address
space beyond what all of torch takes, and one written file."""
GOOD = (0, 2)
_WRITES = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.chmod"}
_FOLLOWS = {"os.truncate", "os.chmod"}
_MOVES = {"os.rename", "os.link", "os.symlink"}
_HARMLESS = ("uname", "git", "lscpu")
"""Programs that describe the machine and the version of the code."""
_STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn"}


class Guard:
    """An audit hook that records what is written outside of a folder, and programs started."""

    def __init__(self, folder):
        self.folder, self.findings = os.path.realpath(folder), []
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, str | bytes | os.PathLike):
                return
            written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(mode or "") & set(
                "wax+"
            )
            self.check(event, [path] if written else [], follow=not flags & os.O_NOFOLLOW)
        elif event in _WRITES:
            self.check(event, arguments[:1], follow=event in _FOLLOWS)
        elif event in _MOVES:
            paths = arguments[1:2] if event == "os.symlink" else arguments[:2]
            self.check(event, paths, follow=False)
        elif event in _STARTS and arguments[0] not in _HARMLESS:
            self.findings.append(f"{event}: {arguments!r}"[:200])

    def check(self, event, paths, follow):
        """Record paths that lie outside. follow: whether a link at the end of one is followed."""
        for path in paths:
            if isinstance(path, int):
                continue
            with contextlib.suppress(ValueError):
                above, name = os.path.split(os.path.join(os.getcwd(), os.fsdecode(path)))
                real = os.path.join(os.path.realpath(above), name)
                real = os.path.realpath(real) if follow or name in (".", "..") else real
                inside = os.path.commonpath([real, self.folder]) == self.folder
                if not inside and not real.startswith(
                    ("/dev/null", "/dev/shm/torch", "/proc/self")
                ):
                    self.findings.append(f"{event} outside: {real}")


def run_child(target, draw, folder, report):
    """Change the inputs in `folder` and take them; never returns. report: file for the outcome."""
    os.setpgid(0, 0)
    sys.dont_write_bytecode = True  # a target may not write outside of its folder
    os.chdir(folder)
    words, variables = change(target, draw)
    for number, path in ((0, os.devnull), (1, "../out"), (2, "../err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    # A test's own streams would not write there.
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    os.environ.update({"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)})
    os.environ.update(variables)
    tempfile.tempdir = None
    sys.argv = ["program", *words]
    resident = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    guard = Guard(folder)
    for limit, most in (
        (resource.RLIMIT_AS, resident + BYTES),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    status, trace = 0, ""
    try:
        with report_errors():
            target.call()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        status, trace = 1, traceback.format_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    outcome = {"status": status, "trace": trace, "guard": guard.findings}
    os.write(report, json.dumps(outcome).encode())
    os._exit(0)


def change(target, draw):
    """Change some of a target's inputs, or none without `draw`. Returns its words and variables."""
    if draw is None:
        return list(target.words), {}
    ways = [way for way in ("files", "words", "variables", "planted") if getattr(target, way)]
    if len(target.words) == target.fixed and "words" in ways:
        ways.remove("words")
    way = draw.choice(ways)
    words, variables = list(target.words), {}
    if way == "files":
        paths = sorted(path for pattern in target.files for path in Path().glob(pattern))
        for path in draw.sample(paths, min(len(paths), draw.choice([1, 1, 1, 2]))):
            mutators.change_file(draw, path, bool(target.planted))
    elif way == "planted":
        for name in draw.sample(target.planted, draw.choice([1, 1, min(3, len(target.planted))])):
            mutators.plant(draw, Path(name))
    elif way == "words":
        words[target.fixed :] = mutators.change_arguments(draw, words[target.fixed :])
    else:
        for name in draw.sample(target.variables, draw.choice([1, 2, 4])):
            text = draw.choice([*mutators.TEXTS, "0", "1", "2", "4096", "-3", "65536", "1e9"])
            variables[name] = text
    return words, variables


def judge(target, status, report, folder, before):
    """Return the kind of outcome of a child, and for a finding what it was."""
    texts = {name: (folder.parent / name).read_bytes() for name in ("out", "err")}
    if status is None:
        return "hung", f"more than {HANGING} s by the clock"
    if not report:
        died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status
        slow = died in ("SIGXCPU", "SIGKILL")
        return (
            ("slow", f"more than {SECONDS} s")
            if slow
            else ("died", f"{died} {texts['err'][-300:]}")
        )
    outcome = json.loads(report)
    if outcome["guard"]:
        return "outside", outcome["guard"][0]
    if read_outside(folder.parent) != {**mutators.SECRETS, "folder": None}:
        return "outside", f"the files beside are now {sorted(read_outside(folder.parent))}"
    if outcome["trace"] or b"Traceback (most" in texts["err"]:
        trace = outcome["trace"] or texts["err"].decode(errors="replace")
        return "traceback", locate(trace)
    if outcome["status"] not in (*GOOD, *target.statuses):
        return "status", f"status {outcome['status']}: {texts['err'][-200:]!r}"
    if outcome["status"] == 2 and not any(
        prefix in texts["err"] for prefix in (b"error: ", b"usage: ")
    ):
        return "status", f"status 2 without an error: {texts['err'][-200:]!r}"
    for name, text in {**texts, **read_written(folder, before)}.items():
        if mutators.SECRET.encode() in text and not target.passes:
            if b"unrecognized arguments" in text or b"usage: " in text:
                continue  # argparse repeats what it was given on the same terminal
            return "secret", f"in {name}: {text[:200]!r}"
        if name in texts and b"\x1b" in text and b"usage: " not in text:
            return "escape", f"in {name}: {text[max(0, text.index(27) - 80) :][:160]!r}"
    message = texts["err"].decode(errors="replace")
    return ("answer", "") if outcome["status"] != 2 else ("refused", message)


def read_outside(home):
    """Return the files beside the working folder, and None for each folder."""
    paths = (home / "outside").rglob("*")
    return {path.name: path.read_text() if path.is_file() else None for path in paths}


def read_written(folder, before):
    """Return the content of the files of a folder that were not there before the program ran."""
    contents = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name not in before and path.is_file() and not path.is_symlink():
            contents[name] = path.read_bytes()[: 1 << 24]
    return contents


def locate(trace):
    """Return the innermost line of the project in a traceback, and the error."""
    own_lines = [
        line.strip() for line in trace.splitlines() if "File " in line and str(ROOT) in line
    ]
    own_lines = [line for line in own_lines if "/tests/support/fuzz/" not in line] or own_lines
    place = own_lines[-1].replace(f"{ROOT}/", "") if own_lines else "?"
    last = [line for line in trace.splitlines() if line.strip()][-1]
    return f"{place}: {last[:200]}"


def run_case(target, case, seed, template, folder):
    """Take one changed input, or the valid one if `case` is None; return kind and text of the
    outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = folder / "work"
    shutil.copytree(template, work)
    before = {str(path.relative_to(work)) for path in work.rglob("*")}
    for name in ("out", "err"):
        (folder / name).touch()
    (folder / "outside/folder").mkdir(parents=True)
    for name, text in mutators.SECRETS.items():
        (folder / "outside" / name).write_text(text)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            draw = None if case is None else random.Random(f"{seed} {target.name} {case}")
            run_child(target, draw, work, writing)
        except BaseException:
            traceback.print_exc()  # of the fuzzer itself
        finally:
            os._exit(99)
    os.close(writing)
    status, end = None, time.monotonic() + HANGING
    while time.monotonic() < end:
        gone, code = os.waitpid(pid, os.WNOHANG)
        if gone:
            status = code
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read() if status is not None else b""
    return judge(target, status, report, work, before)


class Fuzzer:
    """Takes inputs of all targets in turn. kept: the first input of each kind of finding."""

    def __init__(self, seed, home, names=()):
        self.seed, self.home = seed, Path(home)
        self.targets = [target for target in list_targets() if not names or target.name in names]
        self.counts = {target.name: Counter() for target in self.targets}
        self.findings = {}
        self.kept_folder = self.home / "findings"
        for target in self.targets:
            self.prepare(target)
        gc.collect()
        gc.freeze()

    def template(self, target):
        return (
            self.home
            / "valid"
            / f"{target.make.__qualname__}".replace("<locals>.", "")
            / (target.name if "<locals>" in target.make.__qualname__ else "")
        )

    def prepare(self, target):
        """Make the valid inputs of a target, and see that they are taken."""
        folder = self.template(target)
        if not folder.exists():
            folder.mkdir(parents=True)
            here = os.getcwd()
            os.chdir(folder)
            try:
                target.make()
            finally:
                os.chdir(here)
        kind, text = run_case(target, None, self.seed, folder, self.home / "case")
        assert kind == "answer", f"{target.name}: its valid input is no answer: {kind} {text}"

    def take(self, target, case):
        """Take an input, count its outcome, and keep what it was if it is a finding."""
        folder = self.home / "case"
        kind, text = run_case(target, case, self.seed, self.template(target), folder)
        self.counts[target.name][kind] += 1
        if kind not in ("answer", "refused"):
            known = self.findings.setdefault((target.name, kind, text[:160]), [case, 0, text])
            known[1] += 1
            if known[1] == 1:
                shutil.move(folder, self.kept_folder / f"{target.name.replace(' ', '-')}-{case}")
        return kind, text

    def run(self, seconds, cases=None):
        """Take inputs for some seconds, or a number of each target."""
        end, case = time.monotonic() + seconds, 0
        while time.monotonic() < end and (cases is None or case < cases):
            for target in self.targets:
                self.take(target, case)
                if time.monotonic() > end:
                    break
            case += 1

    def summary(self):
        """Return counts of all outcomes, and a line for each finding."""
        total = sum((count for count in self.counts.values()), Counter())
        lines = [f"{'':<14}{'inputs':>8}{'answers':>9}{'refused':>9}{'findings':>10}"]
        for name, count in [*self.counts.items(), ("all", total)]:
            inputs, good = count.total(), count["answer"] + count["refused"]
            row = f"{inputs:>8}{count['answer']:>9}{count['refused']:>9}{inputs - good:>10}"
            lines.append(f"{name:<14}{row}")
        for (name, kind, _), (case, times, text) in sorted(self.findings.items()):
            repeat = f"--seed {self.seed} --target {name!r} --case {case}"
            lines.append(f"{kind}, {times} times: {text}\n    again: {repeat}")
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", default=str(int(time.time())), help="default: the time")
    parser.add_argument("--target", action="append", default=[], help="of which; default: all")
    parser.add_argument("--case", type=int, help="take this input only, and leave it in ./fuzzed")
    options = parser.parse_args()
    home = Path("fuzzed").resolve() if options.case is not None else Path(tempfile.mkdtemp())
    (home / "findings").mkdir(parents=True, exist_ok=True)
    fuzzer = Fuzzer(options.seed, home, options.target)
    if options.case is not None:
        for target in fuzzer.targets:
            print(*fuzzer.take(target, options.case))
        return 0
    fuzzer.run(options.seconds)
    print(f"seed {options.seed}\n{fuzzer.summary()}")
    if fuzzer.findings:
        print(f"the inputs are in {fuzzer.kept_folder}")
        return 1
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
