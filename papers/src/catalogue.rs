//! What can be reproduced: the figures and tables, their benchmarks, the papers' values and findings.
//!
//! Only what the papers' texts say in numbers is here as theirs; curves that are only drawn are not read
//! off. Which part of a benchmark's row is ours: [`Column`].

mod query;

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Figure,
    Table,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Figure => "figure",
            Kind::Table => "table",
        }
    }
}

/// A benchmark of `lab/` and its arguments by size: each for one round.
pub(crate) struct Run {
    pub(crate) bench: &'static str,
    pub(crate) quick: &'static [&'static str],
    pub(crate) usual: &'static [&'static str],
    pub(crate) paper: &'static [&'static str],
    /// What a round of the paper's size takes on two processors, about.
    pub(crate) paper_minutes: u64,
}

/// A figure or table.
pub(crate) struct Item {
    pub(crate) paper: &'static str,
    pub(crate) kind: Kind,
    pub(crate) number: u32,
    pub(crate) title: &'static str,
    pub(crate) run: Run,
    pub(crate) points: &'static [Point],
    pub(crate) findings: &'static [Finding],
}

impl Item {
    /// Its name on the command line.
    pub(crate) fn name(&self) -> String {
        format!("{} {} {}", self.kind.name(), self.number, self.paper)
    }
}

/// A value of a figure.
#[derive(Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) label: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) theirs: Theirs,
    /// What the row contains: parts of its name; between commas, its baseline.
    pub(crate) row: &'static [&'static str],
    pub(crate) ours: Column,
}

/// The paper's value.
#[derive(Debug, PartialEq)]
pub(crate) enum Theirs {
    Unknown,
    Is(f64),
    /// The row's baseline is the authors' program.
    Baseline,
}

/// Our value in a row.
#[derive(Debug, PartialEq)]
pub(crate) enum Column {
    Value,
    Ratio,
    /// The baseline's value: of somebody else's program, run here.
    Baseline,
    /// One over the ratio: a time over its baseline.
    Inverse,
    /// The same as a change in percent.
    Change,
}

/// Looks our value of a point up by its label.
pub(crate) type Ours<'a> = &'a dyn Fn(&str) -> Option<f64>;

/// What a finding is seen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// Pages, bytes, lines: a busy machine changes nothing.
    Counts,
    /// Times and rates.
    Times,
    /// Changes of times that are to be about none.
    NoChange,
}

/// What the paper concludes.
pub(crate) struct Finding {
    pub(crate) text: &'static str,
    pub(crate) by: Evidence,
    /// Hardware without which it may stay undecided; `None`: more rounds decide it.
    pub(crate) needs: Option<&'static str>,
    /// Whether it holds for our values; `None`: one is missing.
    pub(crate) holds: fn(Ours<'_>) -> Option<bool>,
}

const fn point(
    label: &'static str,
    unit: &'static str,
    theirs: Theirs,
    row: &'static [&'static str],
    ours: Column,
) -> Point {
    Point { label, unit, theirs, row, ours }
}

/// Pages swapped by a variant at 50 % of local memory.
const fn swapped(label: &'static str, row: &'static [&'static str]) -> Point {
    point(label, "pages", Theirs::Baseline, row, Column::Value)
}

/// Links that cross pages.
const fn links(label: &'static str, row: &'static [&'static str]) -> Point {
    point(label, "% of links", Theirs::Baseline, row, Column::Value)
}

/// Lines that a variant adds.
const fn lines(label: &'static str, theirs: f64, row: &'static [&'static str]) -> Point {
    point(label, "lines", Theirs::Is(theirs), row, Column::Value)
}

/// Runtime of TPC-H by how much one read brings, of that in DRAM.
const fn tpch(label: &'static str, row: &'static [&'static str]) -> Point {
    point(label, "of DRAM", Theirs::Unknown, row, Column::Inverse)
}

/// Runtime with metadata separated, as a change against together.
const fn separated(label: &'static str, theirs: f64, row: &'static [&'static str]) -> Point {
    point(label, "% of runtime", Theirs::Is(theirs), row, Column::Change)
}

/// Runtime with metadata separated at a scale factor, as a change against together.
const fn scaled(label: &'static str, row: &'static [&'static str]) -> Point {
    point(label, "% of runtime", Theirs::Unknown, row, Column::Change)
}

/// A value of somebody else's allocator.
const fn allocator(label: &'static str, unit: &'static str, row: &'static [&'static str]) -> Point {
    point(label, unit, Theirs::Unknown, row, Column::Baseline)
}

/// A value of one allocator's own, whose curve is only drawn.
const fn own(label: &'static str, unit: &'static str, row: &'static [&'static str]) -> Point {
    point(label, unit, Theirs::Unknown, row, Column::Value)
}

const METADATA: Run = Run {
    bench: "metadata",
    quick: &["--rounds", "3"],
    usual: &["--rounds", "1"],
    paper: &["--paper", "--rounds", "1"],
    paper_minutes: 15,
};

const COOPERATIVE: Run = Run {
    bench: "cooperative",
    quick: &["--seconds", "5", "--every", "2.5", "--hold", "1.2", "--warm-up", "1.5"],
    usual: &[],
    paper: &["--full"],
    paper_minutes: 35,
};

const PLACEMENT: Run = Run {
    bench: "placement",
    quick: &["--n", "335544", "--local", "50", "--alpha", "0.8"],
    usual: &[],
    // The points of the figures' findings; `--paper` alone measures the whole grid, which takes hours.
    paper: &["--paper", "--local", "50", "--alpha", "0.8"],
    paper_minutes: 40,
};

const TIERS: Run = Run {
    bench: "tiers",
    // Small enough that six rounds of all benchmarks fit into a quick run.
    quick: &[
        "tpch",
        "separation",
        "cpp",
        "--rounds",
        "1",
        "--passes",
        "2",
        "--scale-factor",
        "0.25",
        "--scale-factors",
        "0.1",
        "--pairs",
        "3",
    ],
    usual: &["tpch", "separation", "cpp", "--rounds", "1"],
    paper: &["tpch", "separation", "cpp", "--paper", "--rounds", "1", "--passes", "5"],
    paper_minutes: 30,
};

/// The values of those labels that are known.
fn known(ours: Ours<'_>, labels: &[&str]) -> Vec<f64> {
    labels.iter().filter_map(|label| ours(label)).collect()
}

/// Whether all known changes are from `least` to `most` percent.
fn between(ours: Ours<'_>, labels: &[&str], least: f64, most: f64) -> Option<bool> {
    let known = known(ours, labels);
    (!known.is_empty()).then(|| known.iter().all(|change| (least..=most).contains(change)))
}

/// Whether some known change is no improvement beyond the paper's own noise.
fn not_always_faster(ours: Ours<'_>, labels: &[&str]) -> Option<bool> {
    const NOISE_PERCENT: f64 = 2.0;
    let known = known(ours, labels);
    (!known.is_empty()).then(|| known.iter().any(|change| *change > -NOISE_PERCENT))
}

const SEPARATED_QUERIES: &[&str] = &[
    "queries, scale factor 0.1",
    "queries, scale factor 0.5",
    "queries, scale factor 1",
    "queries, scale factor 2",
    "queries, scale factor 4",
    "queries, scale factor 8",
];
const SEPARATED_MIGRATION: &[&str] = &[
    "migration, scale factor 0.1",
    "migration, scale factor 0.5",
    "migration, scale factor 1",
    "migration, scale factor 2",
    "migration, scale factor 4",
    "migration, scale factor 8",
];

/// Less than.
fn less(ours: Ours<'_>, one: &str, other: &str) -> Option<bool> {
    Some(ours(one)? < ours(other)?)
}

const AT_50: &str = " L=50% alpha=0.8 U=0.05 swapped";
const CROSS: &str = " L=50% cross-page links";

pub(crate) const CATALOGUE: &[Item] = &[
    Item {
        paper: "cooperative",
        kind: Kind::Figure,
        number: 1,
        title: "what traditional memory management leaves unused, and which queries fail",
        run: COOPERATIVE,
        points: &[
            allocator("unused, partitioned", "% of the limit", &["memory unused,"]),
            own("unused, one limit", "% of the limit", &["memory unused,"]),
            allocator("failed, partitioned", "% of queries", &["queries of 0.6 limits that fail,"]),
            own("failed, one limit", "% of queries", &["queries of 0.6 limits that fail,"]),
        ],
        findings: &[
            Finding {
                text: "(A) a part for each leaves memory unused: twice as much as one limit, or more",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| Some(ours("unused, partitioned")? > 2.0 * ours("unused, one limit")?),
            },
            Finding {
                text: "(B) queries that need more than their part fail, and do not under one limit",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| {
                    Some(ours("failed, partitioned")? > 0.0 && ours("failed, one limit")? == 0.0)
                },
            },
        ],
    },
    Item {
        paper: "cooperative",
        kind: Kind::Figure,
        number: 2,
        title: "a mixed workload with traditional and cooperative memory management",
        run: COOPERATIVE,
        points: &[
            point(
                "throughput without a query",
                "of partitioned",
                Theirs::Is(2.71 / 1.42),
                &["new orders without query"],
                Column::Ratio,
            ),
            point(
                "throughput during a query",
                "of partitioned",
                Theirs::Is(1.33 / 1.42),
                &["new orders during query"],
                Column::Ratio,
            ),
            point(
                "throughput, whole run",
                "of partitioned",
                Theirs::Is(2.51 / 1.42),
                &["new orders; all of the run"],
                Column::Ratio,
            ),
            point(
                "allocation, per GB",
                "ms",
                Theirs::Is(111.0),
                &["allocation; per GB"],
                Column::Value,
            ),
            point(
                "query 9, rate",
                "of partitioned",
                Theirs::Is(13.2 / 12.9),
                &["query 9"],
                Column::Ratio,
            ),
        ],
        findings: &[
            Finding {
                text: "without a query cooperation gives the transactions more throughput",
                by: Evidence::Times,
                needs: None,
                holds: |ours| Some(ours("throughput without a query")? > 1.1),
            },
            Finding {
                text: "during a query throughput is equal (0.8 to 1.25, or better)",
                by: Evidence::Times,
                needs: None,
                holds: |ours| Some(ours("throughput during a query")? >= 0.8),
            },
            Finding {
                text: "average throughput is higher",
                by: Evidence::Times,
                needs: None,
                holds: |ours| Some(ours("throughput, whole run")? > 1.1),
            },
            Finding {
                text: "a real query is not slower (0.95 or better)",
                by: Evidence::Times,
                needs: None,
                holds: |ours| Some(ours("query 9, rate")? >= 0.95),
            },
        ],
    },
    Item {
        paper: "collective",
        kind: Kind::Figure,
        number: 4,
        title: "links between nodes that cross pages",
        run: PLACEMENT,
        points: &[
            links("B-tree hint", &["btree hint ", CROSS]),
            links("B-tree dfs", &["btree dfs ", CROSS]),
            links("B-tree vEB", &["btree veb ", CROSS]),
            links("B-tree local", &["btree local ", CROSS]),
            links("B-tree local+dfs", &["btree local+dfs ", CROSS]),
            links("B-tree local+vEB", &["btree local+veb ", CROSS]),
            links("skip list hint", &["skiplist hint ", CROSS]),
            links("skip list page", &["skiplist page ", CROSS]),
            links("skip list local", &["skiplist local ", CROSS]),
            links("skip list local+page", &["skiplist local+page ", CROSS]),
        ],
        findings: &[
            Finding {
                text: "hints leave far more links that cross pages than per-page sub-allocators",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| {
                    Some(
                        ours("B-tree hint")? > 1.5 * ours("B-tree dfs")?
                            && ours("skip list hint")? > 1.5 * ours("skip list page")?,
                    )
                },
            },
            Finding {
                text: "vEB has more links that cross pages than dfs",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "B-tree dfs", "B-tree vEB"),
            },
        ],
    },
    Item {
        paper: "collective",
        kind: Kind::Figure,
        number: 5,
        title: "pages swapped by B-trees at 50 % of local memory, Zipf 0.8, 5 % updates",
        run: PLACEMENT,
        points: &[
            swapped("B-tree hint", &["btree hint ", AT_50]),
            swapped("B-tree dfs", &["btree dfs ", AT_50]),
            swapped("B-tree vEB", &["btree veb ", AT_50]),
            swapped("B-tree local", &["btree local ", AT_50]),
            swapped("B-tree local+dfs", &["btree local+dfs ", AT_50]),
            swapped("B-tree local+vEB", &["btree local+veb ", AT_50]),
        ],
        findings: &[
            Finding {
                text: "dfs swaps less than hints",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "B-tree dfs", "B-tree hint"),
            },
            Finding {
                text: "dfs pays beside purely local nodes too: local+dfs swaps less than local",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "B-tree local+dfs", "B-tree local"),
            },
            Finding {
                text: "purely local nodes pay: local+dfs swaps less than dfs",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "B-tree local+dfs", "B-tree dfs"),
            },
            Finding {
                text: "vEB swaps less than dfs",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "B-tree vEB", "B-tree dfs"),
            },
        ],
    },
    Item {
        paper: "collective",
        kind: Kind::Figure,
        number: 6,
        title: "pages swapped by skip lists at 50 % of local memory, Zipf 0.8, 5 % updates",
        run: PLACEMENT,
        points: &[
            swapped("skip list hint", &["skiplist hint ", AT_50]),
            swapped("skip list page", &["skiplist page ", AT_50]),
            swapped("skip list local", &["skiplist local ", AT_50]),
            swapped("skip list local+page", &["skiplist local+page ", AT_50]),
        ],
        findings: &[
            Finding {
                text: "as for B-trees: page swaps less than hints",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| less(ours, "skip list page", "skip list hint"),
            },
            Finding {
                text: "as for B-trees: local+page swaps less than page and than local",
                by: Evidence::Counts,
                needs: None,
                holds: |ours| {
                    Some(
                        less(ours, "skip list local+page", "skip list page")?
                            && less(ours, "skip list local+page", "skip list local")?,
                    )
                },
            },
        ],
    },
    Item {
        paper: "collective",
        kind: Kind::Table,
        number: 3,
        title: "lines that each placement adds to its container",
        run: PLACEMENT,
        points: &[
            lines("B-tree dfs", 62.0, &["btree dfs lines added"]),
            lines("B-tree vEB", 88.0, &["btree veb lines added"]),
            lines("B-tree local", 133.0, &["btree local lines added"]),
            lines("B-tree local+dfs", 160.0, &["btree local+dfs lines added"]),
            lines("B-tree hint", 45.0, &["btree hint lines added"]),
            lines("skip list page", 54.0, &["skiplist page lines added"]),
            lines("skip list local", 131.0, &["skiplist local lines added"]),
            lines("skip list local+page", 162.0, &["skiplist local+page lines added"]),
            lines("skip list hint", 33.0, &["skiplist hint lines added"]),
        ],
        findings: &[Finding {
            text: "a placement takes some hundred lines or less beside the container",
            by: Evidence::Counts,
            needs: None,
            holds: |ours| {
                let all = ["B-tree dfs", "B-tree vEB", "B-tree local", "B-tree local+dfs"];
                all.iter()
                    .map(|label| Some(ours(label)? <= 250.0))
                    .try_fold(true, |all, one| one.map(|one| all && one))
            },
        }],
    },
    Item {
        paper: "metadata",
        kind: Kind::Figure,
        number: 5,
        title: "runtime of TPC-H by how much a read brings, cache of 20 % of the data, normalised to DRAM",
        run: TIERS,
        points: &[
            tpch("4 KiB", &["tpch 4 KiB a read"]),
            tpch("up to 2 MiB, as learnt", &["tpch 2 MiB a read"]),
            tpch("as learnt, in C++", &["C++ queries; scale factor"]),
        ],
        findings: &[Finding {
            text: "(3) how much a read brings decides: 4 KiB cost 1.2 times the best or more",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("4 KiB")? >= 1.2 * ours("up to 2 MiB, as learnt")?),
        }],
    },
    Item {
        paper: "metadata",
        kind: Kind::Figure,
        number: 6,
        title: "allocated memory during segment migration",
        run: TIERS,
        points: &[
            point(
                "metadata, of the data",
                "%",
                Theirs::Is(0.35),
                &["tpch migration; metadata"],
                Column::Inverse,
            ),
            own("the same, in C++", "%", &["C++ metadata; scale factor"]),
        ],
        findings: &[Finding {
            text: "(4) metadata takes less than one percent of what is migrated",
            by: Evidence::Counts,
            needs: None,
            holds: |ours| Some(ours("metadata, of the data")? < 1.0),
        }],
    },
    Item {
        paper: "metadata",
        kind: Kind::Figure,
        number: 7,
        title: "processor time of queries and of migration with metadata separated, by scale factor",
        run: TIERS,
        points: &[
            scaled(
                SEPARATED_QUERIES[0],
                &["separation; scale factor 0.1: processor time of queries,"],
            ),
            scaled(
                SEPARATED_QUERIES[1],
                &["separation; scale factor 0.5: processor time of queries,"],
            ),
            scaled(
                SEPARATED_QUERIES[2],
                &["separation; scale factor 1: processor time of queries,"],
            ),
            scaled(
                SEPARATED_QUERIES[3],
                &["separation; scale factor 2: processor time of queries,"],
            ),
            scaled(
                SEPARATED_QUERIES[4],
                &["separation; scale factor 4: processor time of queries,"],
            ),
            scaled(
                SEPARATED_QUERIES[5],
                &["separation; scale factor 8: processor time of queries,"],
            ),
            scaled(
                SEPARATED_MIGRATION[0],
                &["separation; scale factor 0.1: processor time of migration,"],
            ),
            scaled(
                SEPARATED_MIGRATION[1],
                &["separation; scale factor 0.5: processor time of migration,"],
            ),
            scaled(
                SEPARATED_MIGRATION[2],
                &["separation; scale factor 1: processor time of migration,"],
            ),
            scaled(
                SEPARATED_MIGRATION[3],
                &["separation; scale factor 2: processor time of migration,"],
            ),
            scaled(
                SEPARATED_MIGRATION[4],
                &["separation; scale factor 4: processor time of migration,"],
            ),
            scaled(
                SEPARATED_MIGRATION[5],
                &["separation; scale factor 8: processor time of migration,"],
            ),
            scaled("queries, in C++", &["C++ queries separated; scale factor"]),
            scaled("migration, in C++", &["C++ migration separated; scale factor"]),
        ],
        findings: &[
            Finding {
                text: "(5) separation does not make queries faster at every scale factor",
                by: Evidence::Times,
                needs: None,
                holds: |ours| not_always_faster(ours, SEPARATED_QUERIES),
            },
            Finding {
                text: "(5) queries change by -2 % to 2 %",
                by: Evidence::NoChange,
                needs: None,
                holds: |ours| between(ours, SEPARATED_QUERIES, -2.0, 2.0),
            },
            Finding {
                text: "(6) separation does not make migration faster at every scale factor",
                by: Evidence::Times,
                needs: None,
                holds: |ours| not_always_faster(ours, SEPARATED_MIGRATION),
            },
            Finding {
                text: "(6) migration changes by -1.8 % to 2.8 %",
                by: Evidence::NoChange,
                needs: None,
                holds: |ours| between(ours, SEPARATED_MIGRATION, -1.8, 2.8),
            },
        ],
    },
    Item {
        paper: "metadata",
        kind: Kind::Figure,
        number: 8,
        title: "processor time of small and large allocations with metadata separated",
        run: METADATA,
        points: &[
            separated("1 KiB", 0.8, &["1 KiB; written: processor time; metadata separated"]),
            separated("16 KiB", 0.2, &["16 KiB; written: processor time; metadata separated"]),
        ],
        findings: &[Finding {
            text: "(7) separating metadata costs less than one percent",
            by: Evidence::Times,
            needs: None,
            holds: |ours| Some(ours("1 KiB")? < 1.0 && ours("16 KiB")? < 1.0),
        }],
    },
    Item {
        paper: "metadata",
        kind: Kind::Figure,
        number: 9,
        title: "runtime of allocations in memory with metadata separated (theirs: a NUMA node)",
        run: METADATA,
        points: &[
            separated("small", -0.13, &["random; 1 B to 16 KiB: metadata separated"]),
            separated("large", -0.24, &["random; 16 to 256 KiB: metadata separated"]),
        ],
        findings: &[Finding {
            text: "(8) separating metadata changes the runtime by less than one percent",
            by: Evidence::NoChange,
            needs: Some("two memory nodes, as theirs"),
            holds: |ours| Some(ours("small")?.abs() < 1.0 && ours("large")?.abs() < 1.0),
        }],
    },
    query::FIGURE_1,
    query::FIGURE_2,
    query::FIGURE_3,
    query::FIGURE_4,
    query::FIGURE_5,
    query::FIGURE_6,
    query::FIGURE_7,
    query::FIGURE_8,
    query::TABLE_1,
    query::TABLE_2,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_has_a_name_of_its_own_and_labels_are_not_repeated() {
        let mut names: Vec<_> = CATALOGUE.iter().map(Item::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CATALOGUE.len());
        for item in CATALOGUE {
            let mut labels: Vec<_> = item.points.iter().map(|point| point.label).collect();
            labels.sort_unstable();
            labels.dedup();
            assert_eq!(labels.len(), item.points.len(), "{}", item.name());
            assert!(!item.findings.is_empty(), "{}", item.name());
        }
    }

    #[test]
    fn all_that_the_papers_measure_is_here_and_three_findings_need_other_hardware() {
        let of = |paper: &str, kind| -> Vec<u32> {
            let items = CATALOGUE.iter().filter(|item| item.paper == paper && item.kind == kind);
            items.map(|item| item.number).collect()
        };
        assert_eq!(of("cooperative", Kind::Figure), [1, 2]);
        assert_eq!(of("collective", Kind::Figure), [4, 5, 6]);
        assert_eq!(of("collective", Kind::Table), [3]);
        assert_eq!(of("metadata", Kind::Figure), [5, 6, 7, 8, 9]);
        assert_eq!(of("query", Kind::Figure), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(of("query", Kind::Table), [1, 2]);
        let findings = CATALOGUE.iter().flat_map(|item| item.findings);
        assert_eq!(findings.filter(|finding| finding.needs.is_some()).count(), 3);
    }

    #[test]
    fn the_lab_has_the_benchmark_of_every_item() {
        let manifest = include_str!("../../lab/Cargo.toml");
        for Item { run: Run { bench, .. }, .. } in CATALOGUE {
            assert!(manifest.contains(&format!("[[bench]]\nname = \"{bench}\"\n")), "{bench}");
        }
    }

    #[test]
    fn items_of_one_benchmark_take_one_run() {
        for item in CATALOGUE {
            for other in CATALOGUE.iter().filter(|other| other.run.bench == item.run.bench) {
                assert_eq!(other.run.usual, item.run.usual);
                assert_eq!((other.run.quick, other.run.paper), (item.run.quick, item.run.paper));
            }
        }
    }
}
