#!/usr/bin/env python3
"""Real programs under a limit: plain, under `farheap run`, and under the kernel's swap.

    cargo build --release --no-default-features -p farheap-cli -p farheap-preload
    hosts/run.py                       # all programs, some minutes each
    hosts/run.py redis sort --rounds 3
    hosts/run.py --small sort perl     # seconds
    hosts/run.py --curve               # programs that nearly fit, as a curve
    hosts/run.py --write               # puts the table into book/src/measurements/programs.md

Each program has a file here, with a function `prepare(dir, small)` that makes its input, and a function
`work(side, dir)` that runs it and returns the answer: what `side` starts is measured. Programs run plain first.
The peak of that is what 100 % means: then each runs in memory control groups of 100, 50 and 25 % of it, under
`farheap run`, whose limit follows the group and which may not swap, and with a swap file. The answers must be equal.
What is not installed, and what is not permitted, is said and left out. Figures go to
target/figures/hosts.csv, with --curve to curve.csv and curve.svg, each as soon as it is there.
"""

import argparse
import atexit
import importlib
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import picture

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ["sort", "sqlite", "redis", "memcached", "python", "pandas", "duckdb", "perl", "node", "postgres", "git", "gcc",
            "btree", "zstd", "cache-zipf-1", "cache-zipf-4", "cache-skewed-1", "cache-skewed-4"]
MIB = 1 << 20
# The least that a program is given: farheap takes 8 MiB for far memory, and code and stacks are in the limit.
LIMIT_MIN = 20 * MIB
REFUSED = 125
PAGE = 4096
# Programs whose hot part and cold part nearly fit, and shares of their peak around that.
CURVE = ["zstd", "sqlite", "btree", "cache-skewed-4"]
CURVE_LIMITS = "103,95,90,80,60"
# Shares of swap's speed and of its bytes written to reach where 50 to 65 % of the peak fit; the geometric mean of the former.
GOAL_SPEED, GOAL_MEAN, GOAL_WRITTEN = 1.0, 1.3, 1 / 1.5


class Skipped(Exception):
    """The machine does not have or permit it."""


class Stopped(Exception):
    """It did not come to its end: why."""


# Runs a program as its child and says what that took. A process counts as its own peak what its parent had when
# it forked, and this script is larger than some limits.
LAUNCHER = """
import os, signal, sys
pid = os.fork()
if pid == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
status, usage = os.wait4(pid, 0)[1:]
with open(sys.argv[1], "w") as file:
    file.write(f"{usage.ru_utime + usage.ru_stime} {usage.ru_maxrss}")
status = os.waitstatus_to_exitcode(status)
os._exit(status if status >= 0 else 128 - status)
"""


class Started:
    """A program that runs. Its peak is that of the largest process of it."""

    def __init__(self, argv, options):
        self.report = tempfile.NamedTemporaryFile()
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, self.report.name]
        self.process = subprocess.Popen(launcher + argv, start_new_session=True, **options)
        self.is_late = False

    def wait(self, deadline):
        """Waits for the end; the status. After the deadline the program is killed with all it started."""
        try:
            status = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.is_late = True
            self.signal(signal.SIGKILL)
            self.process.wait()
        if self.is_late:
            raise Stopped("stopped at the deadline")
        return status

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def end(self):
        """Kills what is left; processor seconds and bytes at the peak, if the program ended by itself."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        words = self.report.read().split()
        self.report.close()
        return (float(words[0]), int(words[1]) * 1024) if words else (0.0, 0)


class Side:
    """How programs are started."""

    def __init__(self, name, prefix=(), group=None, environment=None):
        self.name, self.prefix, self.group = name, list(prefix), group
        self.environment = environment or {}
        self.before = None
        self.started = []
        self.deadline = 0
        self.began = 0.0

    def start(self, argv, cwd=None, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=None):
        """Starts a program that is measured."""
        argv = self.prefix + [str(word) for word in argv]
        if self.group:
            # The shell enters the group and becomes the program.
            enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
            argv = ["sh", "-c", enter, str(self.group.path)] + argv
        errors = tempfile.TemporaryFile()
        options = {"cwd": cwd, "stdin": stdin, "stdout": stdout, "stderr": errors}
        started = Started(argv, options | {"env": {**os.environ, **self.environment, **(env or {})}})
        started.errors = errors
        self.started.append(started)
        return started

    def run(self, argv, **options):
        """Runs a program that is measured to its end; fails unless it succeeds."""
        started = self.start(argv, **options)
        status = started.wait(self.deadline)
        if status != 0:
            started.errors.seek(0)
            text = started.errors.read().decode(errors="replace").strip()
            # `farheap run` gives the reason last.
            if self.prefix and status == REFUSED:
                raise Skipped(text.splitlines()[-1] if text else "refused")
            raise RuntimeError(f"{argv[0]} on {self.name}: status {status}\n{text}")

    def measured(self):
        """From here on time counts: what a program does before is preparation."""
        self.began = time.monotonic()

    def left(self):
        """Seconds until the deadline, for a client that waits."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def paged(self):
        """Faults that waited for the device, and bytes read and written, of all that was started; None where unknown."""
        if self.prefix:
            return paged_by_farheap(self.started)
        if self.group:
            return tuple(now - before for now, before in zip(self.group.paged(), self.before))
        return (0, 0, 0)

    def end(self):
        """Ends what runs; processor seconds of all programs, the largest peak, and what was paged."""
        ends = [started.end() for started in self.started]
        paged = self.paged()
        for started in self.started:
            started.errors.close()
        return sum(cpu for cpu, _ in ends), max((peak for _, peak in ends), default=0), paged


# What `farheap run --stats` prints at the end of each process that had far memory.
STATS = re.compile(r"^farheap: .*faults (\d+) read, \d+ zero; ([\d.]+) (\S+) read, ([\d.]+) (\S+) written", re.M)
UNITS = {unit: 1024**power for power, unit in enumerate(["B", "KiB", "MiB", "GiB", "TiB"])}


def paged_by_farheap(started):
    """As Side.paged."""
    texts = []
    for one in started:
        one.errors.seek(0)
        texts.append(one.errors.read().decode(errors="replace"))
    found = [match for text in texts for match in STATS.findall(text)]
    # A signal ends a program without the line; one that never had a heap has another.
    if not found and not all("farheap: " in text for text in texts):
        return None
    bytes_of = lambda number, unit: float(number) * UNITS[unit]
    return (sum(int(match[0]) for match in found), sum(bytes_of(match[1], match[2]) for match in found),
            sum(bytes_of(match[3], match[4]) for match in found))


class Outcome:
    def __init__(self, seconds, cpu, peak, paged, answer):
        self.seconds, self.cpu, self.peak, self.paged, self.answer = seconds, cpu, peak, paged, answer


def perform(program, side, dir, deadline):
    """One run of a program on one side; why it did not come to its end, as text."""
    side.started, side.began = [], time.monotonic()
    side.deadline = side.began + deadline
    side.before = side.group.paged() if side.group else None
    try:
        answer = program.work(side, dir)
        seconds = time.monotonic() - side.began
    except Exception as error:
        # The kernel found nothing to page out in time; what is left of the program may fail in any way then.
        if side.group and side.group.kills():
            return "killed: the group has no memory"
        if isinstance(error, Stopped):
            return str(error)
        raise
    finally:
        cpu, peak, paged = side.end()
    return Outcome(seconds, cpu, peak, paged, answer)


def tool(*argv):
    try:
        subprocess.run(argv, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise Skipped(f"{argv[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise Skipped(f"{argv[0]}: {error.stderr.decode().strip()}") from error


class Swap:
    """A swap file. The whole machine may swap to it."""

    def __init__(self, dir, size):
        if os.geteuid() != 0:
            raise Skipped("swap needs root")
        kind = subprocess.run(["stat", "-f", "-c", "%T", dir], capture_output=True, text=True)
        # Swap on a file in memory would page the file itself out to it.
        if kind.stdout.strip() in ("tmpfs", "ramfs"):
            raise Skipped(f"{dir} is in memory")
        self.path = pathlib.Path(dir) / f"farheap-hosts-{os.getpid()}.swap"
        atexit.register(self.end)
        with open(self.path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            for _ in range(size // MIB):
                file.write(bytes(MIB))
            os.fsync(file.fileno())
        tool("mkswap", str(self.path))
        tool("swapon", str(self.path))

    def end(self):
        subprocess.run(["swapoff", str(self.path)], capture_output=True)
        self.path.unlink(missing_ok=True)


class Group:
    """A memory control group of version 1 or 2."""

    def __init__(self, limit, may_swap):
        first = pathlib.Path("/sys/fs/cgroup/memory")
        if (first / "memory.limit_in_bytes").exists():
            parent, file, swap = first, "memory.limit_in_bytes", "memory.swappiness"
        else:
            parent, file, swap = self.unified(), "memory.max", "memory.swap.max"
        self.path = parent / f"farheap-hosts-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / file).write_text(str(limit))
            if not may_swap:
                (self.path / swap).write_text("0")
        except OSError as error:
            raise Skipped(f"memory groups: {error}") from error

    def paged(self):
        """Major faults so far, and bytes read from swap and written to it."""
        counts = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        # Groups of version 1 do not count what is written: there it is that of the machine.
        out = counts.get("pswpout") or re.search(r"^pswpout (\d+)$", pathlib.Path("/proc/vmstat").read_text(), re.M)[1]
        return int(counts["pgmajfault"]), PAGE * int(counts["workingset_refault_anon"]), PAGE * int(out)

    def kills(self):
        """Processes of the group that the kernel has killed for want of memory."""
        files = [self.path / name for name in ("memory.oom_control", "memory.events")]
        return sum(int(count) for file in files if file.exists()
                   for count in re.findall(r"^oom_kill (\d+)$", file.read_text(), re.M))

    @staticmethod
    def unified():
        for parent in map(pathlib.Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")):
            try:
                if "memory" in (parent / "cgroup.controllers").read_text().split():
                    (parent / "cgroup.subtree_control").write_text("+memory")
                    return parent
            except OSError:
                pass
        raise Skipped("no memory controller of control groups")

    def end(self):
        # The kernel counts a process in for a moment after it was waited for, and tells nobody.
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.02)
        print(f"{self.path} could not be removed")


def far_side(target, options, group=None):
    command, name = target / "farheap", "libfarheap_preload.so"
    libraries = [path for path in (target / name, target / "deps" / name) if path.exists()]
    if not command.exists() or not libraries:
        sys.exit(f"{target} has no farheap and {name}: cargo build --release --no-default-features -p farheap-cli -p farheap-preload")
    library = max(libraries, key=lambda path: path.stat().st_mtime)
    prefix = [str(command), "run", *options, "--"]
    return Side("farheap", prefix, group, {"FARHEAP_PRELOAD_LIBRARY": str(library)})


# The kernel kills a group now and then whose pages it cannot write to swap as fast as the program makes them dirty.
SWAP_TRIES = 3


def rounds(program, make, dir, args, tries=1):
    """Runs one side some times; the median outcome, or why one did not come to its end in any of its tries."""
    outcomes = []
    for _ in range(args.rounds):
        for _ in range(tries):
            outcome = one_round(program, make, dir, args.deadline)
            if not isinstance(outcome, str):
                break
        if isinstance(outcome, str):
            return outcome
        outcomes.append(outcome)
    middle = sorted(outcomes, key=lambda outcome: outcome.seconds)[len(outcomes) // 2]
    middle.peak = max(outcome.peak for outcome in outcomes)
    return middle


def one_round(program, make, dir, deadline):
    side = make()
    try:
        if side.group:
            # Code and libraries count for the group that first reads them: for this one, as in a container.
            drop_caches()
            perform(program, side, dir, deadline)
        return perform(program, side, dir, deadline)
    finally:
        if side.group:
            side.group.end()


def drop_caches():
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        print(f"groups are not charged for code that is in memory already: {error}")


FIGURES = {
    "time": ("s", lambda outcome: outcome.seconds),
    "processor time": ("s CPU", lambda outcome: outcome.cpu),
    "faults": ("k", lambda outcome: outcome.paged and outcome.paged[0] / 1e3),
    "pages in": ("k", lambda outcome: outcome.paged and outcome.paged[1] / PAGE / 1e3),
    "written": ("MiB", lambda outcome: outcome.paged and outcome.paged[2] / MIB),
}


def cell(value):
    """Three digits."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


class Table:
    """The lines that are printed, and the rows of target/figures, which are those of the benchmarks."""

    FIGURES = FIGURES

    def __init__(self, args, name):
        names = [f"{name}, {unit}" for name, (unit, _) in self.FIGURES.items()]
        heads = ["program", "side", "group, MiB", *names, "peak, MiB", "answer"]
        self.lines = [f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * (len(heads) - 3) + "---|"]
        self.is_wrong = False
        self.rows, self.is_curve = [], name == "curve"
        folder = ROOT / "target" / "figures" / ("smoke" if args.small else "")
        folder.mkdir(parents=True, exist_ok=True)
        self.csv = folder / f"{name}.csv"
        self.begin()
        for line in self.lines:
            print(line)

    def begin(self):
        self.csv.write_text("work,value,unit,baseline,baseline_value,ratio,goal\n")

    def line(self, name, side, limit, outcome, plain):
        limit = f"{limit / MIB:.0f}" if limit else ""
        if isinstance(outcome, str):
            cells = [name, side, limit, *[""] * len(self.FIGURES), "", outcome]
        else:
            is_equal = outcome.answer == plain.answer
            self.is_wrong |= not is_equal
            if not is_equal:
                print(f"{side} answers {outcome.answer[:500]!r}, plain {plain.answer[:500]!r}", file=sys.stderr)
            figures = [cell(figure(outcome)) for _, figure in self.FIGURES.values()]
            cells = [name, side, limit, *figures, f"{outcome.peak / MIB:.1f}", "equal" if is_equal else "WRONG"]
        self.lines.append(f"| {' | '.join(cells)} |")
        print(self.lines[-1], flush=True)

    def compare(self, name, share, far, swap):
        """The rows of both sides in groups of a size."""
        for what, (unit, figure) in self.FIGURES.items():
            value, base = (None if isinstance(outcome, str) else figure(outcome) for outcome in (far, swap))
            self.row(f"{name} at {share} %: {what}", value, unit, "swap", base, self.goal(what, share))

    def goal(self, what, share):
        if self.is_curve:
            # Nothing is to be read where all fits.
            return 1 if what in ("faults", "pages in") or (what == "written" and share > 100) else None
        return {"time": GOAL_SPEED, "written": GOAL_WRITTEN}.get(what) if 50 <= share <= 65 else None

    def row(self, work, value, unit, name, base, goal):
        is_known = value is not None and base is not None
        ratio = (1 if value == base else base / value if value else math.inf) if is_known else None
        self.rows.append((work, value, base, ratio, goal))
        numbers = ["" if number is None else f"{number:.4f}" for number in (value, base, ratio, goal)]
        with open(self.csv, "a") as file:
            file.write(f"{work},{numbers[0]},{unit},{name},{numbers[1]},{numbers[2]},{numbers[3]}\n")

    def mean(self):
        """The geometric mean of times at half of the peak."""
        ratios = [ratio for work, _, _, ratio, _ in self.rows if work.endswith("at 50 %: time") and ratio]
        if ratios and not self.is_curve:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            self.row(f"geometric mean of {len(ratios)} programs at 50 %", 1 / mean, "times", "swap", 1, GOAL_MEAN)

    def tell_goals(self):
        judged = [(ratio, goal) for _, _, _, ratio, goal in self.rows if goal and ratio is not None]
        print(f"{sum(ratio >= goal for ratio, goal in judged)} of {len(judged)} goals met; figures in {self.csv}")


def measure(name, table, args):
    module, _, variant = name.partition("-")
    program = importlib.import_module(module)
    if variant:
        program.choose(variant)
    missing = [need for need in program.NEEDS if not shutil.which(need)]
    if missing:
        print(f"skipped: {name}: {', '.join(missing)} is not installed")
        return
    # Some need more than a command.
    why = program.MISSING() if hasattr(program, "MISSING") else None
    if why:
        print(f"skipped: {name}: {why}")
        return
    with tempfile.TemporaryDirectory(prefix="farheap-hosts-", dir=args.dir) as dir:
        program.prepare(dir, args.small)
        plain = rounds(program, lambda: Side("plain"), dir, args)
        if isinstance(plain, str):
            print(f"skipped: {name}: in memory it is {plain}")
            return
        title = f"{name}: {program.ABOUT(args.small)}"
        table.line(title, "plain", 0, plain, plain)
        for share in args.limits:
            limit = max(plain.peak * share // 100, LIMIT_MIN)
            far = lambda: far_side(args.target, [*args.run, "--stats"], Group(limit, may_swap=False))
            swap = lambda: Side("swap", group=Group(limit, may_swap=True))
            try:
                far = rounds(program, far, dir, args)
            except Skipped as why:
                print(f"skipped: {name} with farheap: {why}")
                return
            table.line(name, f"farheap {share} %", limit, far, plain)
            if args.swap:
                swap = rounds(program, swap, dir, args, SWAP_TRIES)
                table.line(name, f"swap {share} %", limit, swap, plain)
                table.compare(name, share, far, swap)


def start_swap(args):
    """Whether there is swap; says why not."""
    try:
        Swap(args.dir, (256 if args.small else 2048) * MIB)
        return True
    except Skipped as why:
        print(f"skipped: swap: {why}")
        return False


def write(table):
    path = ROOT / "book/src/measurements/programs.md"
    text = path.read_text()
    begin, end = "<!-- hosts/run.py -->\n", "<!-- end -->\n"
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(head + begin + "\n".join(table.lines) + "\n" + end + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("program", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--small", action="store_true", help="input for seconds, at 50 %% only")
    parser.add_argument("--curve", action="store_true", help=f"{', '.join(CURVE)} at {CURVE_LIMITS} %% (--small: 103,60)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each side (1)")
    parser.add_argument("--limits", metavar="PERCENT,..", help="groups (100,50,25)")
    parser.add_argument("--run", action="append", default=[], metavar="OPTION", help="an option of farheap run")
    parser.add_argument("--no-swap", action="store_true", help="leaves the kernel's swap out")
    parser.add_argument("--deadline", type=int, default=300, metavar="S", help="stops a run after this (300)")
    parser.add_argument("--dir", default=tempfile.gettempdir(), metavar="DIR", help="for all files")
    parser.add_argument("--target", type=pathlib.Path, default=target, metavar="DIR", help="has farheap")
    parser.add_argument("--write", action="store_true", help="puts the table into book/src/measurements/programs.md")
    args = parser.parse_args()
    unknown = [name for name in args.program if name not in PROGRAMS]
    if unknown:
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    usual = ("103,60" if args.small else CURVE_LIMITS) if args.curve else "50" if args.small else "100,50,25"
    args.limits = [int(word) for word in (args.limits or usual).split(",")]
    args.target = args.target.resolve()
    os.environ["TMPDIR"] = args.dir
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        Group(LIMIT_MIN, may_swap=False).end()
    except Skipped as why:
        print(f"skipped: {why}")
        return
    args.swap = not args.no_swap and start_swap(args)
    table = Table(args, "curve" if args.curve else "hosts")
    for name in args.program or (CURVE if args.curve else PROGRAMS):
        measure(name, table, args)
        if args.curve:
            picture.curve(table.rows, table.csv.with_suffix(".svg"))
    table.mean()
    table.tell_goals()
    if args.write:
        write(table)
    sys.exit("an answer is wrong" if table.is_wrong else 0)


if __name__ == "__main__":
    main()
