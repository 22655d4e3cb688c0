#!/usr/bin/env python3
"""redis under `farheap run` saves from forked children while it is written to: each save is what it had at the fork.

    cargo build --release --no-default-features -p farheap-cli -p farheap-preload
    hosts/saves.py                     # 100 saves of four times the limit: some minutes
    hosts/saves.py --saves 3 --limit 64

A client asks all the time, half of it writes, and knows which version of each value redis has. The file of each save
is compared with that. Meanwhile the memory of parent and child together is read: each page that both map counts
once (`Pss`). Says the largest sum, and ends with status 1 when a byte is wrong.
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import struct
import sys
import tempfile
import time

from redis import Client
from run import MIB, ROOT, far_side

BATCH = 20
LEAST, MOST = 2 << 10, 64 << 10


class Data:
    """What redis has: the size of each value, and its version."""

    def __init__(self, total, draw):
        self.draw, self.sizes = draw, []
        while sum_of(self.sizes) < total:
            # As many bytes in small values as in large ones.
            self.sizes += [int(LEAST * (MOST / LEAST) ** draw.random()) for _ in range(64)]
        self.versions = [0] * len(self.sizes)

    def value(self, key, version):
        word = b"%07d:%07d " % (key, version)
        return (word * (self.sizes[key] // len(word) + 1))[: self.sizes[key]]

    def write(self, key):
        self.versions[key] += 1
        return (b"SET", b"key:%d" % key, self.value(key, self.versions[key]))

    def work(self, client):
        """Writes and reads, half each."""
        keys = [self.draw.randrange(len(self.sizes)) for _ in range(BATCH)]
        expected = []
        requests = []
        for key in keys:
            if self.draw.random() < 0.5:
                requests.append(self.write(key))
                expected.append(b"OK")
            else:
                requests.append((b"GET", b"key:%d" % key))
                expected.append(self.value(key, self.versions[key]))
        if client.ask(requests) != expected:
            sys.exit("redis gives another answer than it was given")


def sum_of(sizes):
    return sum(sizes)


class Reader:
    """A file of redis, as far as it is texts."""

    def __init__(self, text):
        self.text, self.at = text, 9

    def take(self, count):
        self.at += count
        return self.text[self.at - count : self.at]

    def length(self):
        """A length, or the kind of a text that is a number."""
        first = self.take(1)[0]
        if first >> 6 == 0:
            return first & 63, None
        if first >> 6 == 1:
            return (first & 63) << 8 | self.take(1)[0], None
        if first >> 6 == 2:
            form = ">I" if first == 0x80 else ">Q"
            return struct.unpack(form, self.take(struct.calcsize(form)))[0], None
        return 0, first & 63

    def word(self):
        length, kind = self.length()
        return self.take(length) if kind is None else self.take(1 << kind)

    def values(self):
        """Pairs of key and value."""
        while (code := self.take(1)[0]) != 0xFF:
            if code == 0xFA:
                self.word(), self.word()
            elif code in (0xFE, 0xFB):
                [self.length() for _ in range(2 if code == 0xFB else 1)]
            elif code == 0:
                yield self.word(), self.word()
            else:
                sys.exit(f"code {code:#x} in the file of redis")


def wrong_values(path, data, versions):
    """How many values of a file are not of these versions, or missing."""
    left = set(range(len(versions)))
    count = 0
    for name, value in Reader(path.read_bytes()).values():
        key = int(name[4:])
        left.discard(key)
        count += value != data.value(key, versions[key])
    return count + len(left)


def field(path, name):
    """Bytes that a file of /proc says; 0 if the process has ended."""
    try:
        for line in open(path):
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def children(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def save(client, data, server, path):
    """One save, compared: seconds, the largest sum of memory meanwhile, wrong values."""
    versions, began, most, parts = list(data.versions), time.monotonic(), 0, []
    client.ask([(b"BGSAVE",)])
    while True:
        data.work(client)
        pids = children(server)
        sums = [field(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in [server, *pids]]
        if sum(sums) > most:
            most, parts = sum(sums), sums
        info = client.ask([(b"INFO", b"persistence")])[0]
        if b"rdb_bgsave_in_progress:0" in info:
            break
    if b"rdb_last_bgsave_status:ok" not in info:
        sys.exit("redis could not save")
    return time.monotonic() - began, most, parts, wrong_values(path, data, versions)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    parser.add_argument("--saves", type=int, default=100, metavar="N")
    parser.add_argument("--limit", type=int, default=32, metavar="MIB")
    parser.add_argument("--times", type=float, default=4, metavar="N", help="data, in limits (4)")
    parser.add_argument("--run", action="append", default=[], metavar="OPTION", help="an option of farheap run")
    parser.add_argument("--dir", default=tempfile.gettempdir(), metavar="DIR", help="for all files")
    parser.add_argument("--target", type=pathlib.Path, default=target, metavar="DIR", help="has farheap")
    args = parser.parse_args()
    if not shutil.which("redis-server"):
        sys.exit("redis-server is not installed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    limit, wrong, most = args.limit * MIB, 0, 0
    with tempfile.TemporaryDirectory(prefix="farheap-saves-", dir=args.dir) as dir:
        side = far_side(args.target.resolve(), ["--limit", str(limit), *args.run])
        side.deadline = time.monotonic() + 24 * 3600
        path = f"{dir}/redis"
        server = side.start(["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", dir,
                             "--appendonly", "no", "--rdbcompression", "no"], stdout=None)
        try:
            client = Client(path, side)
            pid = int(client.ask([(b"INFO", b"server")])[0].split(b"process_id:")[1].split()[0])
            data = Data(limit * args.times, random.Random(1))
            for start in range(0, len(data.sizes), BATCH):
                client.ask([data.write(key) for key in range(start, min(start + BATCH, len(data.sizes)))])
            peak = field(f"/proc/{pid}/status", "VmHWM:")
            print(f"{len(data.sizes)} values; filled: peak {peak / MIB:.1f} MiB of {args.limit}", flush=True)
            for number in range(args.saves):
                seconds, sums, parts, bad = save(client, data, pid, pathlib.Path(f"{dir}/dump.rdb"))
                wrong, most = wrong + (bad > 0), max(most, sums)
                parts = " + ".join(f"{part / MIB:.1f}" for part in parts)
                print(f"save {number + 1}: {seconds:.2f} s, {parts} MiB, {sums / limit:.2f} of the limit, "
                      f"{bad} values wrong", flush=True)
            peak = field(f"/proc/{pid}/status", "VmHWM:")
        finally:
            side.end()
    print(f"{args.saves - wrong} of {args.saves} saves equal; parent and child {most / limit:.2f} of the limit at most; "
          f"peak of the parent {peak / MIB:.1f} MiB")
    sys.exit(1 if wrong else 0)


main()
