//! The paper on allocators and query processing. Most of its curves are only drawn; the text draws the conclusions.

use super::{
    Column, Evidence, Finding, Item, Kind, Ours, Point, Run, Theirs, allocator, less, own, point,
};

const QUERY: Run = Run {
    bench: "query_alloc",
    quick: &["--quick", "--rounds", "1"],
    usual: &["--rounds", "1"],
    paper: &["--paper", "--rounds", "1"],
    paper_minutes: 50,
};

/// Average resident memory of what is requested.
const fn resident(label: &'static str, theirs: f64, row: &'static [&'static str]) -> Point {
    point(label, "of requested", Theirs::Is(theirs), row, Column::Inverse)
}

/// A part of something of one allocator's own.
const fn part(label: &'static str, of: &'static str, row: &'static [&'static str]) -> Point {
    point(label, of, Theirs::Unknown, row, Column::Inverse)
}

/// The paper's allocators beside jemalloc. glibc's is 2.36 here, 2.23 and 2.28 there.
const OTHERS: [&str; 3] = ["TBBmalloc", "TCMalloc", "glibc"];

/// The largest of all four allocators' values over their least, of values beside jemalloc's.
fn range(ours: Ours<'_>) -> Option<f64> {
    let others: Vec<f64> = OTHERS.iter().map(|label| ours(label)).collect::<Option<_>>()?;
    let largest = others.iter().copied().fold(1.0, f64::max);
    Some(largest / others.iter().copied().fold(1.0, f64::min))
}

/// The order of the allocators' medians at a rate, by values beside jemalloc's.
fn order(ours: Ours<'_>, rate: &str) -> Option<Vec<&'static str>> {
    let others = OTHERS.iter().map(|label| Some((*label, ours(&format!("{label}, {rate}"))?)));
    let mut all = others.collect::<Option<Vec<_>>>()?;
    all.push(("jemalloc", 1.0));
    all.sort_by(|one, other| one.1.total_cmp(&other.1));
    Some(all.into_iter().map(|(label, _)| label).collect())
}

pub(super) const FIGURE_1: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 1,
    title: "time and memory of a set of queries, all at once, by allocator",
    run: QUERY,
    points: &[
        own("jemalloc", "s", &["rate all; time of jemalloc,"]),
        part("TBBmalloc", "of jemalloc's", &["rate all; time of TBBmalloc,"]),
        part("TCMalloc", "of jemalloc's", &["rate all; time of TCMalloc,"]),
        part("glibc", "of jemalloc's", &["rate all; time of system,"]),
        part("mimalloc", "of jemalloc's", &["rate all; time of mimalloc,"]),
        part(
            "TBBmalloc, processor time",
            "of jemalloc's",
            &["rate all; processor time of TBBmalloc,"],
        ),
        part(
            "TCMalloc, processor time",
            "of jemalloc's",
            &["rate all; processor time of TCMalloc,"],
        ),
        part("glibc, processor time", "of jemalloc's", &["rate all; processor time of system,"]),
        part(
            "mimalloc, processor time",
            "of jemalloc's",
            &["rate all; processor time of mimalloc,"],
        ),
        own("jemalloc, resident", "MiB", &["rate all; mean resident of jemalloc,"]),
        part("TBBmalloc, resident", "of jemalloc's", &["rate all; mean resident of TBBmalloc,"]),
        part("TCMalloc, resident", "of jemalloc's", &["rate all; mean resident of TCMalloc,"]),
        part("glibc, resident", "of jemalloc's", &["rate all; mean resident of system,"]),
        part("mimalloc, resident", "of jemalloc's", &["rate all; mean resident of mimalloc,"]),
        part("jemalloc, afterwards", "of its peak", &["rate all; resident afterwards jemalloc,"]),
    ],
    findings: &[
        Finding {
            text: "queries take 1.5 times as long with glibc's malloc as with jemalloc (twice there)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("glibc, processor time")? >= 1.5),
        },
        Finding {
            text: "jemalloc has the highest memory consumption",
            by: Evidence::Times,
            needs: None,
            holds: |ours| {
                let of = |label: &str| ours(&format!("{label}, resident"));
                Some(of("TBBmalloc")?.max(of("TCMalloc")?).max(of("glibc")?) <= 1.0)
            },
        },
        Finding {
            text: "jemalloc does not release it directly: half of its peak stays, or more",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("jemalloc, afterwards")? >= 0.5),
        },
    ],
};

pub(super) const FIGURE_2: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 2,
    title: "sizes of allocations, by number and by memory",
    run: QUERY,
    points: &[
        own("below 32 KiB", "% of allocations", &["rate one; allocations from 0 KiB to 32,"]),
        own("32 to 128 KiB", "% of allocations", &["rate one; allocations from 32 KiB to 128,"]),
        own("128 to 512 KiB", "% of allocations", &["rate one; allocations from 128 KiB to 512,"]),
        own(
            "512 KiB to 2 MiB",
            "% of allocations",
            &["rate one; allocations from 512 KiB to 2048,"],
        ),
        own("2 MiB and more", "% of allocations", &["rate one; allocations from 2048 KiB to,"]),
        allocator(
            "below 32 KiB, bytes",
            "% of bytes",
            &["rate one; allocations from 0 KiB to 32,"],
        ),
        allocator(
            "32 to 128 KiB, bytes",
            "% of bytes",
            &["rate one; allocations from 32 KiB to 128,"],
        ),
        allocator(
            "128 to 512 KiB, bytes",
            "% of bytes",
            &["rate one; allocations from 128 KiB to 512,"],
        ),
        allocator(
            "512 KiB to 2 MiB, bytes",
            "% of bytes",
            &["rate one; allocations from 512 KiB to 2048,"],
        ),
        allocator(
            "2 MiB and more, bytes",
            "% of bytes",
            &["rate one; allocations from 2048 KiB to,"],
        ),
    ],
    findings: &[
        Finding {
            text: "the most frequent allocations are of 32 to 512 KiB",
            by: Evidence::Counts,
            needs: None,
            holds: |ours| Some(ours("32 to 128 KiB")? + ours("128 to 512 KiB")? > 50.0),
        },
        Finding {
            text: "smaller allocations hardly count: less than a tenth of the memory",
            by: Evidence::Counts,
            needs: None,
            holds: |ours| Some(ours("below 32 KiB, bytes")? < 10.0),
        },
    ],
};

pub(super) const FIGURE_3: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 3,
    title: "memory over time: what stays after the queries",
    run: QUERY,
    points: &[
        part("jemalloc", "of its peak", &["rate one; resident afterwards jemalloc; theirs,"]),
        part("TBBmalloc", "of its peak", &["rate one; resident afterwards TBBmalloc,"]),
        part("TCMalloc", "of its peak", &["rate one; resident afterwards TCMalloc; theirs,"]),
        part("glibc", "of its peak", &["rate one; resident afterwards system,"]),
        part("glibc, least", "of the third before", &["rate one; least of the last third system,"]),
    ],
    findings: &[
        Finding {
            text: "jemalloc releases most of its memory after the queries",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("jemalloc")? < 0.5),
        },
        Finding {
            text: "TBBmalloc releases most of its memory after the queries",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("TBBmalloc")? < 0.5),
        },
        Finding {
            text: "glibc's malloc holds a minimum of memory that increases over time",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("glibc, least")? > 1.0),
        },
    ],
};

pub(super) const FIGURE_4: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 4,
    title: "latency and wait of queries by allocator",
    run: QUERY,
    points: &[
        own("jemalloc, median", "ms", &["rate one; median latency of jemalloc,"]),
        part("TBBmalloc, median", "of jemalloc's", &["rate one; median latency of TBBmalloc,"]),
        part("TCMalloc, median", "of jemalloc's", &["rate one; median latency of TCMalloc,"]),
        part("glibc, median", "of jemalloc's", &["rate one; median latency of system,"]),
        part("mimalloc, median", "of jemalloc's", &["rate one; median latency of mimalloc,"]),
        point(
            "farheap, local, median",
            "ms",
            Theirs::Unknown,
            &["rate one; latency p50 local,", ",jemalloc,"],
            Column::Value,
        ),
        point(
            "farheap, far, median",
            "ms",
            Theirs::Unknown,
            &["rate one; latency p50 far,", ",jemalloc,"],
            Column::Value,
        ),
    ],
    findings: &[Finding {
        text: "jemalloc has the lowest median latency of TBBmalloc, TCMalloc, glibc and itself",
        by: Evidence::Times,
        needs: None,
        holds: |ours| {
            // Beside jemalloc's, of the same round.
            let others = OTHERS.iter().filter_map(|label| ours(&format!("{label}, median")));
            others.reduce(f64::min).map(|least| least >= 1.0)
        },
    }],
};

pub(super) const FIGURE_5: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 5,
    title: "latency of queries by allocator, at a half, one and two times the rate",
    run: QUERY,
    points: &[
        own("jemalloc, half", "ms", &["rate half; median latency of jemalloc,"]),
        part("TBBmalloc, half", "of jemalloc's", &["rate half; median latency of TBBmalloc,"]),
        part("TCMalloc, half", "of jemalloc's", &["rate half; median latency of TCMalloc,"]),
        part("glibc, half", "of jemalloc's", &["rate half; median latency of system,"]),
        own("jemalloc, one", "ms", &["rate one; median latency of jemalloc,"]),
        part("TBBmalloc, one", "of jemalloc's", &["rate one; median latency of TBBmalloc,"]),
        part("TCMalloc, one", "of jemalloc's", &["rate one; median latency of TCMalloc,"]),
        part("glibc, one", "of jemalloc's", &["rate one; median latency of system,"]),
        own("jemalloc, two", "ms", &["rate two; median latency of jemalloc,"]),
        part("TBBmalloc, two", "of jemalloc's", &["rate two; median latency of TBBmalloc,"]),
        part("TCMalloc, two", "of jemalloc's", &["rate two; median latency of TCMalloc,"]),
        part("glibc, two", "of jemalloc's", &["rate two; median latency of system,"]),
        part("jemalloc, wait", "of latency", &["rate two; mean wait jemalloc,"]),
        part("TBBmalloc, wait", "of latency", &["rate two; mean wait TBBmalloc,"]),
        part("TCMalloc, wait", "of latency", &["rate two; mean wait TCMalloc,"]),
        part("glibc, wait", "of latency", &["rate two; mean wait system,"]),
    ],
    findings: &[
        Finding {
            text: "the allocators' medians have the same order at all three rates",
            by: Evidence::Times,
            // On two, jemalloc and TBBmalloc are equally fast: chance decides which comes first.
            needs: Some("many processors: theirs had 60"),
            holds: |ours| {
                let half = order(ours, "half")?;
                Some(half == order(ours, "one")? && half == order(ours, "two")?)
            },
        },
        Finding {
            text: "at twice the rate waits are most of the latency, with each of them",
            by: Evidence::Times,
            needs: None,
            holds: |ours| {
                let waits = OTHERS.iter().map(|label| ours(&format!("{label}, wait")));
                let all = waits.collect::<Option<Vec<_>>>()?;
                Some(ours("jemalloc, wait")? > 0.5 && all.iter().all(|share| *share > 0.5))
            },
        },
        Finding {
            text: "at half the rate glibc's median is like TBBmalloc's (0.8 to 1.25 times)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| {
                let ratio = ours("glibc, half")? / ours("TBBmalloc, half")?;
                Some((0.8..=1.25).contains(&ratio))
            },
        },
    ],
};

pub(super) const FIGURE_6: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 6,
    title: "memory over time with small queries (scale factor 10)",
    run: QUERY,
    points: &[
        own("jemalloc", "s", &["rate tenth; time of jemalloc,"]),
        part("TBBmalloc", "of jemalloc's", &["rate tenth; time of TBBmalloc,"]),
        part("TCMalloc", "of jemalloc's", &["rate tenth; time of TCMalloc,"]),
        part("glibc", "of jemalloc's", &["rate tenth; time of system,"]),
        part(
            "jemalloc that decays",
            "of without",
            &["rate tenth; mean resident of jemalloc; theirs,"],
        ),
    ],
    findings: &[
        Finding {
            text: "on one socket all allocators take as long (1.1 times the fastest, or less)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(range(ours)? <= 1.1),
        },
        Finding {
            text: "decay takes a tenth of what jemalloc keeps, or more",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("jemalloc that decays")? <= 0.9),
        },
    ],
};

pub(super) const FIGURE_7: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 7,
    title: "latency of small queries (scale factor 10) by machine",
    run: QUERY,
    points: &[
        own("jemalloc", "ms", &["rate tenth; median latency of jemalloc,"]),
        part("TBBmalloc", "of jemalloc's", &["rate tenth; median latency of TBBmalloc,"]),
        part("TCMalloc", "of jemalloc's", &["rate tenth; median latency of TCMalloc,"]),
        part("glibc", "of jemalloc's", &["rate tenth; median latency of system,"]),
        part("mimalloc", "of jemalloc's", &["rate tenth; median latency of mimalloc,"]),
    ],
    findings: &[
        Finding {
            text: "on one socket all allocators are very similar (medians of 1.25 times the least, or less)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(range(ours)? <= 1.25),
        },
        Finding {
            text: "on four sockets TCMalloc is slower than all others, ten times",
            by: Evidence::Times,
            needs: Some("four sockets, as theirs"),
            holds: |_| None,
        },
    ],
};

pub(super) const FIGURE_8: Item = Item {
    paper: "query",
    kind: Kind::Figure,
    number: 8,
    title: "memory over time without what was freed lazily",
    run: QUERY,
    points: &[
        part(
            "jemalloc, lazily freed",
            "of resident",
            &["rate tenth; lazily freed jemalloc; theirs,"],
        ),
        part(
            "TCMalloc, lazily freed",
            "of resident",
            &["rate tenth; lazily freed TCMalloc; theirs,"],
        ),
        part("TBBmalloc, lazily freed", "of resident", &["rate tenth; lazily freed TBBmalloc,"]),
        part("glibc, lazily freed", "of resident", &["rate tenth; lazily freed system,"]),
        part(
            "TCMalloc, the rest",
            "of requested",
            &["rate tenth; resident but for lazily freed TCMalloc; theirs,"],
        ),
    ],
    findings: &[
        Finding {
            text: "jemalloc has 15 % less without what was freed lazily (10 to 20 %)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some((0.1..=0.2).contains(&ours("jemalloc, lazily freed")?)),
        },
        Finding {
            text: "TCMalloc frees lazily too, TBBmalloc and glibc do not",
            by: Evidence::Counts,
            needs: None,
            holds: |ours| {
                let others = ours("TBBmalloc, lazily freed")? + ours("glibc, lazily freed")?;
                Some(ours("TCMalloc, lazily freed")? > 0.01 && others < 0.01)
            },
        },
        Finding {
            text: "TCMalloc's rest follows what is requested (1.1 times it, or less)",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("TCMalloc, the rest")? <= 1.1),
        },
    ],
};

pub(super) const TABLE_1: Item = Item {
    paper: "query",
    kind: Kind::Table,
    number: 1,
    title: "page faults of the operating system by allocator",
    run: QUERY,
    points: &[
        allocator("glibc", "faults", &["rate one; page faults local,", ",system,"]),
        allocator("jemalloc", "faults", &["rate one; page faults local,", ",jemalloc,"]),
        allocator("TBBmalloc", "faults", &["rate one; page faults local,", ",TBBmalloc,"]),
        allocator("TCMalloc", "faults", &["rate one; page faults local,", ",TCMalloc,"]),
        allocator("mimalloc", "faults", &["rate one; page faults local,", ",mimalloc,"]),
    ],
    findings: &[Finding {
        text: "jemalloc takes more page faults than glibc (4 times as many on their machine)",
        by: Evidence::Counts,
        needs: None,
        holds: |ours| less(ours, "glibc", "jemalloc"),
    }],
};

pub(super) const TABLE_2: Item = Item {
    paper: "query",
    kind: Kind::Table,
    number: 2,
    title: "average resident memory by allocator",
    run: QUERY,
    points: &[
        resident("jemalloc", 24.7 / 11.1, &["rate one; average resident jemalloc,"]),
        resident("TBBmalloc", 27.9 / 15.9, &["rate one; average resident TBBmalloc,"]),
        resident("TCMalloc", 53.7 / 17.8, &["rate one; average resident TCMalloc,"]),
        resident("glibc", 42.5 / 20.2, &["rate one; average resident system,"]),
        part("mimalloc", "of requested", &["rate one; average resident mimalloc,"]),
    ],
    findings: &[Finding {
        text: "jemalloc keeps 1.2 times of what is requested or more on average",
        by: Evidence::Times,
        needs: None,
        holds: |ours| Some(ours("jemalloc")? >= 1.2),
    }],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocators_are_in_order_only_where_all_were_measured() {
        let values = [0.5, 0.9, 2.0];
        let ours = |label: &str| {
            let at = OTHERS.iter().position(|name| label.starts_with(name))?;
            (label.ends_with(", one") || !label.contains(',')).then_some(values[at])
        };
        assert_eq!(order(&ours, "one"), Some(vec!["TBBmalloc", "TCMalloc", "jemalloc", "glibc"]));
        assert_eq!((order(&ours, "two"), range(&ours)), (None, Some(4.0)));
    }
}
