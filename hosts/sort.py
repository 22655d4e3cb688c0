"""GNU sort with all lines in memory."""

import hashlib
import random

NEEDS = ["sort"]


def lines(small):
    return 600_000 if small else 1_500_000


def ABOUT(small):
    return f"{lines(small):,} lines in memory"


def prepare(dir, small):
    draw = random.Random(1)
    with open(f"{dir}/lines", "w") as file:
        for number in range(lines(small)):
            file.write(f"{draw.getrandbits(64):016x} {number}\n")


def work(side, dir):
    side.run(["sort", "-S", "1G", "--parallel=2", "-o", f"{dir}/sorted", f"{dir}/lines"], env={"LC_ALL": "C"})
    with open(f"{dir}/sorted", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
