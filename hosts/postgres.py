"""PostgreSQL: pgbench by two clients, then a join and a sort in a backend's own memory.

The server refuses root, so root runs it as the user `postgres`, who keeps CAP_SYS_PTRACE: without it the kernel
serves faults of user mode only. `shared_buffers` is shared memory and never far; what a backend sorts and hashes is.
"""

import glob
import os
import pwd
import shutil
import signal
import subprocess
import time

NEEDS = []
USER = "postgres"
SETTINGS = ["listen_addresses=", "shared_buffers=4MB", "work_mem=512MB", "max_parallel_workers_per_gather=0",
            "fsync=off", "autovacuum=off", "max_wal_size=256MB"]
# pgbench keeps the sums of its tables equal; the rows of a query are counted by their hash.
SUMS = """
select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history),
       (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches),
       (select sum(tbalance) from pgbench_tellers), (select count(*) from pgbench_history);
"""
QUERY = """
with rows as materialized (select n, md5(n::text) as word from generate_series(1, {rows}) as n),
     joined as (select one.word as word, other.n as n
                from rows as one join rows as other on one.word = md5(other.n::text)),
     sorted as (select word, n, row_number() over (order by word desc, n) as place from joined)
select count(*), sum(n * (place % 97)), min(word), max(word) from sorted;
"""

rows = 0


def find(name):
    """The newest server's program; Debian has them outside of the path."""
    places = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]))
    return shutil.which(name) or (places[-1] if places else None)


def as_user():
    """The words before a server's command."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
            "--inh-caps=-all,+sys_ptrace", "--ambient-caps=-all,+sys_ptrace"]


def MISSING():
    missing = [name for name in ("initdb", "postgres", "pgbench", "psql") if not find(name)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if os.geteuid() != 0:
        return None
    if not shutil.which("setpriv"):
        return "setpriv is not installed"
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return f"there is no user {USER}"
    is_permitted = subprocess.run(as_user() + ["true"], capture_output=True).returncode == 0
    return None if is_permitted else "root may not pass CAP_SYS_PTRACE on"


def transactions(small):
    return 1_000 if small else 10_000


def ABOUT(small):
    return f"`pgbench`, 2 times {transactions(small):,} transactions, then {rows_of(small):,} rows joined and sorted"


def rows_of(small):
    return 200_000 if small else 1_000_000


def client(dir, *words, timeout=60):
    """What a client prints."""
    name, *rest = words
    argv = [find(name), "-h", f"{dir}/run", "-U", "farheap", *rest]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def command(dir, data):
    settings = [word for setting in SETTINGS for word in ("-c", setting)]
    return as_user() + [find("postgres"), "-D", data, "-k", f"{dir}/run", *settings]


def wait_until_ready(dir):
    for _ in range(1000):
        try:
            return client(dir, "psql", "-qc", "select 1", "postgres")
        except RuntimeError:
            time.sleep(0.02)
    raise RuntimeError("PostgreSQL does not answer")


def prepare(dir, small):
    global rows
    rows = rows_of(small)
    os.chmod(dir, 0o711)
    for name in ("made", "run"):
        os.mkdir(f"{dir}/{name}", 0o700)
        if os.geteuid() == 0:
            shutil.chown(f"{dir}/{name}", USER, USER)
    made = f"{dir}/made"
    words = ["-U", "farheap", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8", "-D", made]
    subprocess.run(as_user() + [find("initdb"), *words], check=True, capture_output=True)
    with subprocess.Popen(command(dir, made), stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(dir)
            client(dir, "pgbench", "-iq", "-s", "2", "postgres")
        finally:
            server.terminate()


def work(side, dir):
    data = f"{dir}/data"
    shutil.rmtree(data, ignore_errors=True)
    subprocess.run(["cp", "-a", f"{dir}/made", data], check=True)
    side.measured()
    server = side.start(command(dir, data))
    try:
        wait_until_ready(dir)
        count = str(transactions(rows == rows_of(True)))
        client(dir, "pgbench", "-n", "-c", "2", "-t", count, "--random-seed=1", "postgres", timeout=side.left())
        answer = client(dir, "psql", "-Atqc", SUMS, "postgres", timeout=side.left())
        answer += client(dir, "psql", "-Atqc", QUERY.format(rows=rows), "postgres", timeout=side.left())
    except (TimeoutError, subprocess.TimeoutExpired):
        server.is_late = True
    # A server that is told so ends its backends itself, but not when it does not come to it.
    server.signal(signal.SIGKILL if server.is_late else signal.SIGTERM)
    server.wait(side.deadline)
    return answer
