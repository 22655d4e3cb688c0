"""zstd at its highest usual level, with matches far back: tables that are hot and data that is not."""

import hashlib
import random

NEEDS = ["zstd"]


def mib(small):
    return 2 if small else 30


def ABOUT(small):
    return f"`zstd -19 --long=27` of {mib(small)} MiB of words"


def prepare(dir, small):
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randrange(2, 10))) for _ in range(20_000)]
    left = mib(small) << 20
    with open(f"{dir}/words", "w") as file:
        while left > 0:
            # Some words come often.
            text = " ".join(words[int(len(words) * draw.random() ** 3)] for _ in range(10_000))[:left]
            left -= file.write(text)


def work(side, dir):
    side.run(["zstd", "-19", "--long=27", "-q", "-f", "-o", f"{dir}/packed", f"{dir}/words"])
    with open(f"{dir}/packed", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
