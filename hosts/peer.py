"""The programs of `peers/moka`."""

import pathlib

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "peers/moka/target/release/farheap-peer-moka"

arguments = []


def missing():
    manifest = "peers/moka/Cargo.toml"
    return None if PROGRAM.exists() else f"build it: cargo build --release --manifest-path {manifest} --target-dir peers/moka/target"


def prepare(words):
    global arguments
    arguments = words


def work(side, dir):
    with open(f"{dir}/answer", "w") as answer:
        side.run([PROGRAM, *arguments], stdout=answer)
    with open(f"{dir}/answer") as answer:
        return answer.read()
