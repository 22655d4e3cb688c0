"""A BTreeMap of Rust's standard library with skewed look-ups."""

import peer

NEEDS = []
MISSING = peer.missing
KEYS = 600_000


def sizes(small):
    return (KEYS // 4, KEYS // 8) if small else (KEYS, 2 * KEYS)


def ABOUT(small):
    keys, lookups = sizes(small)
    return f"`BTreeMap`, {keys:,} values of 100 bytes, {lookups:,} look-ups (Zipf 0.99)"


def prepare(dir, small):
    peer.prepare(["btree", *sizes(small)])


work = peer.work
