#!/usr/bin/env python3
"""Real programs under a limit: plain, under `farheap run`, and under the kernel's swap.

    cargo build --release --no-default-features -p farheap-cli -p farheap-preload
    hosts/run.py                       # all programs, some minutes each
    hosts/run.py redis sort --rounds 3
    hosts/run.py --small sort perl     # seconds
    hosts/run.py --write               # puts the table into docs/hosts.md

Each program has a file here, with a function `prepare(dir, small)` that makes its input, and a function
`work(side, dir)` that runs it and returns the answer: what `side` starts is measured. Programs run plain first.
The peak of that is what 100 % means: then each runs under `farheap run` with a limit of 100, 50 and 25 % of it,
and, as root, in a memory control group with a swap file and the same
limit. The answers must be equal. What is not installed, and what is not permitted, is said and left out.
"""

import argparse
import atexit
import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAMS = ["sort", "sqlite", "redis", "memcached", "python", "pandas", "duckdb", "perl", "node", "postgres", "git", "gcc"]
MIB = 1 << 20
# What a group is charged for and a resident size leaves out: page tables, stacks of the kernel.
GROUP_SLACK = 2 * MIB
# The least that a program is given: farheap takes 8 MiB for far memory, and code and stacks are in the limit.
LIMIT_MIN = 20 * MIB
REFUSED = 125


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
        self.errors.close()
        words = self.report.read().split()
        self.report.close()
        return (float(words[0]), int(words[1]) * 1024) if words else (0.0, 0)


class Side:
    """How programs are started."""

    def __init__(self, name, prefix=(), group=None, environment=None):
        self.name, self.prefix, self.group = name, list(prefix), group
        self.environment = environment or {}
        self.started = []
        self.deadline = 0
        self.began = 0.0

    def start(self, argv, cwd=None, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=None):
        """Starts a program that is measured."""
        argv = self.prefix + [str(word) for word in argv]
        if self.group:
            # The shell enters the group and becomes the program.
            enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
            argv = ["sh", "-c", enter, str(self.group)] + argv
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
            # The kernel found nothing to page out in time.
            if self.group and status == 128 + signal.SIGKILL:
                raise Stopped("killed: the group has no memory")
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

    def end(self):
        """Ends what runs; processor seconds of all programs and the largest peak."""
        ends = [started.end() for started in self.started]
        return sum(cpu for cpu, _ in ends), max((peak for _, peak in ends), default=0)


class Outcome:
    def __init__(self, seconds, cpu, peak, answer):
        self.seconds, self.cpu, self.peak, self.answer = seconds, cpu, peak, answer


def perform(program, side, dir, deadline):
    """One run of a program on one side; why it did not come to its end, as text."""
    side.started, side.began = [], time.monotonic()
    side.deadline = side.began + deadline
    try:
        answer = program.work(side, dir)
        seconds = time.monotonic() - side.began
    except Stopped as why:
        return str(why)
    finally:
        cpu, peak = side.end()
    return Outcome(seconds, cpu, peak, answer)


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

    def __init__(self, limit):
        first = pathlib.Path("/sys/fs/cgroup/memory")
        if (first / "memory.limit_in_bytes").exists():
            parent, file = first, "memory.limit_in_bytes"
        else:
            parent, file = self.unified(), "memory.max"
        self.path = parent / f"farheap-hosts-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / file).write_text(str(limit))
        except OSError as error:
            raise Skipped(f"memory groups: {error}") from error

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


def far_side(target, limit, options):
    command, name = target / "farheap", "libfarheap_preload.so"
    libraries = [path for path in (target / name, target / "deps" / name) if path.exists()]
    if not command.exists() or not libraries:
        sys.exit(f"{target} has no farheap and {name}: cargo build --release --no-default-features -p farheap-cli -p farheap-preload")
    library = max(libraries, key=lambda path: path.stat().st_mtime)
    prefix = [str(command), "run", "--limit", str(limit), *options, "--"]
    return Side("farheap", prefix, environment={"FARHEAP_PRELOAD_LIBRARY": str(library)})


def rounds(program, make, dir, args):
    """Runs one side some times; the median outcome, or why one did not come to its end."""
    outcomes = []
    for _ in range(args.rounds):
        side = make()
        try:
            if side.group:
                # Code and libraries count for the group that first reads them: for this one, as in a container.
                drop_caches()
                perform(program, side, dir, args.deadline)
            outcome = perform(program, side, dir, args.deadline)
        finally:
            if side.group:
                side.group_owner.end()
        if isinstance(outcome, str):
            return outcome
        outcomes.append(outcome)
    middle = sorted(outcomes, key=lambda outcome: outcome.seconds)[len(outcomes) // 2]
    middle.peak = max(outcome.peak for outcome in outcomes)
    return middle


def drop_caches():
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        print(f"swap's group is not charged for code that is in memory already: {error}")


def swap_side(limit):
    group = Group(limit + GROUP_SLACK)
    side = Side("swap", group=group.path)
    side.group_owner = group
    return side


class Table:
    def __init__(self):
        self.lines = ["| program | side | limit, MiB | time, s | processor time, s | peak, MiB | answer |",
                      "|---|---|---:|---:|---:|---:|---|"]
        self.is_wrong = False
        for line in self.lines:
            print(line)

    def row(self, name, side, limit, outcome, plain):
        limit = f"{limit / MIB:.0f}" if limit else ""
        if isinstance(outcome, str):
            cells = [name, side, limit, "", "", "", outcome]
        else:
            is_equal = outcome.answer == plain.answer
            self.is_wrong |= not is_equal
            if not is_equal:
                print(f"{side} answers {outcome.answer[:500]!r}, plain {plain.answer[:500]!r}", file=sys.stderr)
            cells = [name, side, limit, f"{outcome.seconds:.2f}", f"{outcome.cpu:.2f}",
                     f"{outcome.peak / MIB:.1f}", "equal" if is_equal else "WRONG"]
        self.lines.append(f"| {' | '.join(cells)} |")
        print(self.lines[-1], flush=True)


def measure(name, table, args):
    program = importlib.import_module(name)
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
        table.row(title, "plain", 0, plain, plain)
        for share in args.limits:
            limit = max(plain.peak * share // 100, LIMIT_MIN)
            far = lambda: far_side(args.target, limit, args.run)
            try:
                outcome = rounds(program, far, dir, args)
            except Skipped as why:
                print(f"skipped: {name} with farheap: {why}")
                return
            table.row(name, f"farheap {share} %", limit, outcome, plain)
            if args.swap:
                outcome = rounds(program, lambda: swap_side(limit), dir, args)
                table.row(name, f"swap {share} %", limit, outcome, plain)


def start_swap(args):
    """Whether there is swap; says why not."""
    try:
        Group(LIMIT_MIN).end()
        Swap(args.dir, (256 if args.small else 2048) * MIB)
        return True
    except Skipped as why:
        print(f"skipped: swap: {why}")
        return False


def write(table):
    path = ROOT / "docs" / "hosts.md"
    text = path.read_text()
    begin, end = "<!-- hosts/run.py -->\n", "<!-- end -->\n"
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(head + begin + "\n".join(table.lines) + "\n" + end + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("program", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--small", action="store_true", help="input for seconds, at 50 %% only")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each side (1)")
    parser.add_argument("--limits", metavar="PERCENT,..", help="limits (100,50,25)")
    parser.add_argument("--run", action="append", default=[], metavar="OPTION", help="an option of farheap run")
    parser.add_argument("--no-swap", action="store_true", help="leaves the kernel's swap out")
    parser.add_argument("--deadline", type=int, default=300, metavar="S", help="stops a run after this (300)")
    parser.add_argument("--dir", default=tempfile.gettempdir(), metavar="DIR", help="for all files")
    parser.add_argument("--target", type=pathlib.Path, default=target, metavar="DIR", help="has farheap")
    parser.add_argument("--write", action="store_true", help="puts the table into docs/hosts.md")
    args = parser.parse_args()
    unknown = [name for name in args.program if name not in PROGRAMS]
    if unknown:
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    args.limits = [int(word) for word in (args.limits or ("50" if args.small else "100,50,25")).split(",")]
    args.target = args.target.resolve()
    os.environ["TMPDIR"] = args.dir
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    args.swap = not args.no_swap and start_swap(args)
    sys.path.insert(0, str(HERE))
    table = Table()
    for name in args.program or PROGRAMS:
        measure(name, table, args)
    if args.write:
        write(table)
    sys.exit("an answer is wrong" if table.is_wrong else 0)


if __name__ == "__main__":
    main()
