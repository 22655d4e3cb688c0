#!/usr/bin/env python3
"""The engines of `integrations/`, and SQLite, beside themselves in ordinary memory: answers, time, resident size.

    integrations/run.py                     # builds all and measures them small: minutes to build, seconds to run
    integrations/run.py --paper             # DataFusion with TPC-H at scale factor 1, the others with 100 to 300 MiB
    integrations/run.py --paper --write     # puts the table into integrations/README.md, too
    integrations/run.py arrow redb --built  # some engines, which are built already

Three sides, each a process of its own: *stock* is the engine in ordinary memory without a limit; *swap* is the same in
a memory control group with a swap file; *farheap* is the integration in a group of the same size, which may not swap.
A group has half of what stock has at its peak; for DataFusion, a budget and what a process has beside it. There a
fourth side, *own pool*, is DataFusion's with that budget, whose joins fail. All answers must be equal.
What is not installed or permitted is said and left out; what fails is named at the end, and the status is 1 then.
Figures go to target/figures/integrations.csv, where those of other engines stay, each as soon as it is there, and to
integrations.svg.
"""

import argparse
import csv
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "hosts"))

import picture  # noqa: E402
import run as hosts  # noqa: E402

MIB = hosts.MIB
# What farheap and code need at least.
GROUP_MIN = 32 * MIB
# What operators do not reserve (the example's limit is above the budget by as much), and what the kernel has beside that.
BESIDE, KERNEL = 64 * MIB, 32 * MIB
# redb's pool counts itself, not the process.
REDB_BESIDE = 16 * MIB
# Of swap's speed; MiB that the resident size may be above the budget.
GOAL_SPEED, GOAL_APART = 1.0, 64
# Times and peaks that examples print are no part of an answer.
TIMES = re.compile(r" *[0-9.]+ s  |  VmHWM.*")


class Failed(Exception):
    """What was to be measured cannot be: why, and what to do."""


class Work:
    """One program of an engine: what its sides run, and the group of a stock peak."""

    def __init__(self, name, stock, far, environment, group, own=None):
        self.name, self.stock, self.far, self.own = name, stock, far, own
        self.environment, self.group = environment, group
        self.argv, self.limit = stock, None

    def work(self, side, dir):
        """Runs the chosen side; its answer. See hosts/run.py."""
        with open(f"{dir}/answer", "w+") as answer:
            side.run(self.argv, cwd=dir, stdout=answer, env=self.environment | self.limit)
            answer.seek(0)
            text = answer.read()
        if "skipped: " in text:
            raise hosts.Skipped(text.strip().partition("skipped: ")[2])
        return TIMES.sub(" ", text)


def half(peak):
    return max(peak // 2, GROUP_MIN)


def built(program):
    if not program.exists():
        raise Failed(f"there is no {program}: it is built without --built")
    return program


def simple(name, example, stock, far, environment):
    def works(args, dir):
        program = built(args.programs / "examples" / example)
        return [Work(name, [program, stock], [program, far], environment(args.paper), half)]

    return works


def sqlite(args, dir):
    rows = 1_000_000 if args.paper else 300_000
    program = dir / "sqlite"
    library = built(args.target.parent / args.programs.name / "libfarheap_ffi.so")
    # By the name that it has where it is installed.
    (dir / "libfarheap.so.1").symlink_to(library)
    hosts.tool("cc", "-O2", "-o", str(program), str(ROOT / "ffi/examples/sqlite.c"), f"-I{ROOT}/ffi/include",
               str(library), f"-Wl,-rpath,{dir}", "-lsqlite3")
    script = 'exec "$0" "$@" | tail -n 1'
    side = lambda side: ["sh", "-c", script, program, side, rows]
    return [Work("sqlite", side("own"), side("far"), {}, half)]


def datafusion(args, dir):
    program, scale = built(args.programs / "examples" / "tpch"), "1" if args.paper else "0.05"
    tables = args.tables or dir / "tables"
    if not (tables / "lineitem.parquet").exists():
        tables.mkdir(parents=True, exist_ok=True)
        subprocess.run([program, "make", tables, scale], check=True)
    works = []
    # The build of a join is 1.5 GiB at scale factor 1, those of both twice that.
    budgets = [(512, "join"), (1024, "join"), (2048, "joins")] if args.paper else [(32, "join"), (64, "join"), (128, "joins")]
    for budget, join in budgets:
        for queries in ["all", join]:
            argv = lambda side: [program, side, tables, f"{budget}MiB", queries]
            group = lambda _, budget=budget: budget * MIB + BESIDE + KERNEL
            name = f"datafusion {budget} MiB {'22 queries' if queries == 'all' else queries}"
            works.append(Work(name, argv("memory"), argv("far"), {}, group, argv("budget")))
            works[-1].budget = budget
    chosen = [work for work in works if not args.only or args.only in work.name]
    if not chosen:
        raise Failed(f"--only {args.only}: its rows are {', '.join(work.name for work in works)}")
    return chosen


ENGINES = {
    "arrow": simple("arrow", "columns", "memory", "far", lambda paper: {"ROWS": "5000000" if paper else "1000000"}),
    "tantivy": simple("tantivy", "search", "memory", "far", lambda paper: {"DOCUMENTS": "100000" if paper else "3000"}),
    "redb": simple("redb", "compare", "file", "pool", lambda paper: {"KEYS": "1000000" if paper else "20000"}),
    "sqlite": sqlite,
    "datafusion": datafusion,
}


class Table(hosts.Table):
    FIGURES = {"time": ("s", lambda outcome: outcome.seconds)}

    def __init__(self, args, engines):
        self.engines, self.only = engines, args.only or ""
        self.failed = []
        super().__init__(args, "integrations")

    def begin(self):
        """Keeps the rows of what is not measured now."""
        rows = []
        if self.csv.exists():
            with open(self.csv) as file:
                rows = [row for row in csv.DictReader(file) if not self.is_now(row["work"])]
        super().begin()
        number = lambda text: float(text) if text else None
        for row in rows:
            self.row(row["work"], number(row["value"]), row["unit"], row["baseline"], number(row["baseline_value"]),
                     number(row["goal"]))

    def line(self, name, side, limit, outcome, plain):
        super().line(name, side, limit, outcome, plain)
        # DataFusion's own pool is there to fail, and the kernel kills what it cannot page out in time.
        if isinstance(outcome, str) and side in ("stock", "farheap"):
            self.failed.append(f"{name}: {side}")

    def row(self, work, value, unit, name, base, goal):
        super().row(work, value, unit, name, base, goal)
        picture.bars([(f"{work} / {name}", ratio, goal) for work, _, _, ratio, goal in self.rows], self.csv.with_suffix(".svg"))

    def is_now(self, work):
        """Whether this run measures a row of the name."""
        return work.split()[0].rstrip(":") in self.engines and self.only in work.partition(":")[0]

    def compare_sides(self, work, far, base, name):
        if isinstance(far, str):
            return
        value = lambda figure: None if isinstance(base, str) else figure(base)
        goal = GOAL_SPEED if name == "swap" else None
        self.row(f"{work.name}: time", far.seconds, "s", name, value(lambda one: one.seconds), goal)
        self.row(f"{work.name}: resident", far.peak / MIB, "MiB", name, value(lambda one: one.peak / MIB), None)


def perform(work, argv, limit, side, args, dir):
    """One run of a side."""
    work.argv, work.limit = argv, limit
    try:
        if side.group:
            # Code counts for the group that reads it.
            hosts.drop_caches()
        return hosts.perform(work, side, dir, args.deadline)
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    finally:
        if side.group:
            side.group.end()


def measure(work, table, args, dir):
    redb = work.name == "redb"
    limit = {"LIMIT": "1GiB"} if redb else {}
    stock = perform(work, work.stock, limit, hosts.Side("stock"), args, dir)
    table.line(work.name, "stock", 0, stock, stock)
    if isinstance(stock, str):
        return
    if work.own:
        own = perform(work, work.own, {}, hosts.Side("own pool"), args, dir)
        if not isinstance(own, str) and own.answer != stock.answer:
            failed = sum(" failed: " in line for line in own.answer.splitlines())
            own = f"{failed} of {len(own.answer.splitlines())} fail" if failed else own
        table.line(work.name, "own pool", 0, own, stock)
    size = work.group(stock.peak)
    swap = None
    if args.swap:
        for _ in range(hosts.SWAP_TRIES):
            swap = perform(work, work.stock, limit, hosts.Side("swap", group=hosts.Group(size, may_swap=True)), args, dir)
            if not isinstance(swap, str):
                break
        table.line(work.name, "swap", size, swap, stock)
    group = hosts.Group(size, may_swap=False) if args.groups else None
    own = {"LIMIT": str(size - REDB_BESIDE) if redb else "auto" if group else str(size)}
    far = perform(work, work.far, own, hosts.Side("farheap", group=group), args, dir)
    table.line(work.name, "farheap", size, far, stock)
    if swap is not None:
        table.compare_sides(work, far, swap, "swap")
    table.compare_sides(work, far, stock, "stock")
    if hasattr(work, "budget") and not isinstance(far, str):
        most = work.budget + GOAL_APART
        table.row(f"{work.name}: resident", far.peak / MIB, "MiB", f"the budget and {GOAL_APART} MiB", most, 1.0)


def build(engines, args):
    """Builds what is measured, each in the profile of the programs."""
    profile = [] if args.debug else ["--release"]
    cargo = lambda *words, target: subprocess.run(
        ["cargo", "build", "--locked", *profile, *words, "--target-dir", str(target)], check=True, cwd=ROOT)
    own = [name for name in engines if name in ("arrow", "redb", "tantivy")]
    if own:
        packages = [word for name in own for word in ("-p", f"farheap-{name}")]
        cargo("--manifest-path", "integrations/Cargo.toml", "--examples", *packages, target=args.target)
    if "datafusion" in engines:
        cargo("--manifest-path", "integrations/datafusion/Cargo.toml", "--example", "tpch", target=args.target)
    if "sqlite" in engines:
        cargo("-p", "farheap-ffi", target=args.target.parent)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser.add_argument("engine", nargs="*", help=", ".join(ENGINES))
    parser.add_argument("--paper", action="store_true", help="real sizes")
    parser.add_argument("--built", action="store_true", help="builds nothing: it is built already")
    parser.add_argument("--debug", action="store_true", help="programs without optimisation: answers only")
    parser.add_argument("--only", metavar="TEXT", help="DataFusion's rows with this in their name")
    absolute = lambda text: pathlib.Path(text).absolute()  # What is measured runs elsewhere.
    parser.add_argument("--tables", type=absolute, metavar="DIR", help="has TPC-H's tables of this size, or is to have them")
    parser.add_argument("--no-swap", action="store_true", help="leaves the kernel's swap out")
    parser.add_argument("--deadline", type=int, default=600, metavar="S", help="stops a run after this (600)")
    parser.add_argument("--dir", type=absolute, default=tempfile.gettempdir(), metavar="DIR",
                        help="for all files, swap's too; best on the disk that is to be measured (%(default)s)")
    parser.add_argument("--target", type=pathlib.Path, default=target / "integrations", metavar="DIR",
                        help="of cargo, for the engines (%(default)s)")
    parser.add_argument("--write", action="store_true", help="puts the table's new lines into integrations/README.md")
    args = parser.parse_args()
    engines = args.engine or list(ENGINES)
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"there is no engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    if args.write and not args.paper:
        parser.error("--write keeps real sizes: add --paper")
    if not os.path.isdir(args.dir):
        parser.error(f"--dir {args.dir}: there is no such directory")
    args.small, args.target = not args.paper, args.target.resolve()
    args.programs = args.target / ("debug" if args.debug else "release")
    os.environ["TMPDIR"] = str(args.dir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if not args.built:
        build(engines, args)
    try:
        hosts.Group(GROUP_MIN, may_swap=False).end()
        args.groups = True
    except hosts.Skipped as why:
        print(f"without groups: {why}")
        args.groups = False
    # Swap holds what a group does not: both builds of DataFusion's joins.
    size_mib = (4096 if args.paper else 1024) if "datafusion" in engines else 1024 if args.paper else 256
    args.swap = args.groups and not args.no_swap and start_swap(args, size_mib)
    table = Table(args, engines)
    for name in engines:
        with tempfile.TemporaryDirectory(prefix="farheap-integrations-", dir=args.dir) as dir:
            try:
                for work in ENGINES[name](args, pathlib.Path(dir)):
                    measure(work, table, args, dir)
            except hosts.Skipped as why:
                print(f"skipped: {name}: {why}")
            except (Failed, subprocess.CalledProcessError) as why:
                print(f"{name}: {why}")
                table.failed.append(name)
    table.tell_goals()
    if args.write and not table.is_wrong:
        write(table)
    sys.exit("an answer is wrong" if table.is_wrong else f"failed: {', '.join(table.failed)}" if table.failed else 0)


def write(table):
    """Replaces the lines of what was measured now."""
    path = ROOT / "integrations" / "README.md"
    begin, end = "<!-- run.py -->\n", "<!-- end -->\n"
    head, _, rest = path.read_text().partition(begin)
    old, _, tail = rest.partition(end)
    name = lambda line: line.strip("| ").partition(" |")[0]
    kept = [line for line in old.splitlines()[2:] if not table.is_now(name(line))]
    lines = sorted(kept + table.lines[2:], key=lambda line: list(ENGINES).index(name(line).split()[0]))
    path.write_text(head + begin + "\n".join(table.lines[:2] + lines) + "\n" + end + tail)


def start_swap(args, size_mib):
    """Whether there is swap; says why not."""
    try:
        hosts.Swap(args.dir, size_mib * MIB)
        return True
    except hosts.Skipped as why:
        print(f"skipped: swap: {why}")
        return False


if __name__ == "__main__":
    main()
