"""A cache of the crate moka: an index of small nodes, and values of 1 KiB."""

import peer

NEEDS = []
MISSING = peer.missing
KEYS, LOOKUPS = 180_000, 1_600_000

skew, threads = "skewed", "4"


def choose(variant):
    """A skew and a number of threads, as in `cache-zipf-1`."""
    global skew, threads
    skew, threads = variant.split("-")


def sizes(small):
    return (KEYS // 6, LOOKUPS // 16) if small else (KEYS, LOOKUPS)


def ABOUT(small):
    keys, lookups = sizes(small)
    return f"`moka`, {keys:,} values of 1 KiB, {lookups:,} look-ups ({skew}) by {threads} threads"


def prepare(dir, small):
    peer.prepare(["cache", skew, *sizes(small), threads])


work = peer.work
