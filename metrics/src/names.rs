//! Names of the metrics: the one table, for this crate and for `farheap top --prometheus`.
//!
//! Rows come from the tables of statistics in farheap itself, so a statistic that is new there is a metric here. Names
//! follow Prometheus' conventions: base units, `_total` for what only grows.

use metrics::Unit;
use std::sync::LazyLock;

/// Subjects of statistics; each has names and labels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricSubject {
    /// The process: label `program` where several are exported together.
    Process,
    /// A tier of a heap, or a region: label `tier`.
    Tier,
    /// A server that a tier's pages are on: labels `tier`, `server`.
    Server,
    /// A buffer pool: label `pool`.
    Pool,
    /// A memory manager: label `manager`.
    Manager,
    /// A consumer of a memory manager: labels `manager`, `consumer`.
    Consumer,
}

/// Kinds of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Is of the moment.
    Gauge,
    /// A quantile of a duration since the start, in the label `quantile`.
    Quantile(&'static str),
}

/// A metric, and the statistic that it has its value from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Metric {
    /// Name of the statistic, as `iter()` of the statistics and the file of `farheap top` have it.
    pub statistic: &'static str,
    /// Name of the metric, with `farheap_` and its unit.
    pub name: String,
    /// The kind.
    pub kind: MetricKind,
    /// Unit of the metric: bytes, seconds or a count.
    pub unit: Unit,
    /// Meaning of the number, in a sentence or two.
    pub help: &'static str,
}

impl Metric {
    /// Returns the metric's value for a value of the statistic: nanoseconds become seconds.
    pub fn value(&self, statistic: u64) -> f64 {
        let scale = if self.unit == Unit::Seconds { 1e9 } else { 1.0 };
        statistic as f64 / scale
    }

    /// `grows` tells what only grows from what is of the moment.
    fn new(
        subject: MetricSubject,
        statistic: &'static str,
        grows: bool,
        help: &'static str,
    ) -> Metric {
        // `bytes_read` counts what `read_bytes_total` does, `used_bytes_max` is `used_max_bytes`.
        let mut name =
            match (statistic.strip_prefix("bytes_"), statistic.strip_suffix("_bytes_max")) {
                (Some(way), _) => format!("{way}_bytes"),
                (_, Some(of)) => format!("{of}_max_bytes"),
                _ => statistic.to_owned(),
            };
        let unit = if name.ends_with("bytes") { Unit::Bytes } else { Unit::Count };
        if grows {
            name += "_total";
        }
        let kind = if grows { MetricKind::Counter } else { MetricKind::Gauge };
        Metric { statistic, name: format!("farheap_{}{name}", subject.prefix()), kind, unit, help }
    }

    /// `of` is what takes the time, `quantile` its part as a number.
    fn latency(
        subject: MetricSubject,
        statistic: &'static str,
        of: &str,
        quantile: &'static str,
    ) -> Metric {
        Metric {
            statistic,
            name: format!("farheap_{}{of}_latency_seconds", subject.prefix()),
            kind: MetricKind::Quantile(quantile),
            unit: Unit::Seconds,
            help: "Quantiles of a latency: of a tier since its start, of a server lately.",
        }
    }
}

impl MetricSubject {
    /// All subjects.
    pub const ALL: [MetricSubject; 6] = [
        MetricSubject::Process,
        MetricSubject::Tier,
        MetricSubject::Server,
        MetricSubject::Pool,
        MetricSubject::Manager,
        MetricSubject::Consumer,
    ];

    /// Returns the metrics of a subject.
    pub fn metrics(self) -> &'static [Metric] {
        static ALL: LazyLock<[Vec<Metric>; 6]> =
            LazyLock::new(|| MetricSubject::ALL.map(MetricSubject::rows));
        &ALL[self as usize]
    }

    fn prefix(self) -> &'static str {
        match self {
            MetricSubject::Process | MetricSubject::Tier => "",
            MetricSubject::Server => "server_",
            MetricSubject::Pool => "pool_",
            MetricSubject::Manager => "manager_",
            MetricSubject::Consumer => "consumer_",
        }
    }

    fn rows(self) -> Vec<Metric> {
        let latencies: &[_] = match self {
            MetricSubject::Tier => &TIER_LATENCIES,
            MetricSubject::Server => &SERVER_LATENCIES,
            _ => &[],
        };
        let tables: &[&[Row]] = match self {
            MetricSubject::Process => &[&PROCESS],
            MetricSubject::Tier => &[&HEAP, TIER],
            MetricSubject::Server => &[&SERVER],
            MetricSubject::Pool => &[POOL],
            MetricSubject::Manager => &[MANAGER],
            MetricSubject::Consumer => &[CONSUMER],
        };
        let rows = tables.iter().copied().flatten();
        rows.map(|&(statistic, grows, help)| Metric::new(self, statistic, grows, help))
            .chain(latencies.iter().map(|&(name, of, part)| Metric::latency(self, name, of, part)))
            .collect()
    }
}

/// Name of a statistic, true if it only grows, and its documentation.
type Row = (&'static str, bool, &'static str);

/// The rows of one of farheap's tables.
macro_rules! rows {
    ($($label:literal { $($(#[doc = $doc:literal])* $name:ident: $kind:ident $words:literal;)* })*) => {
        &[$($((stringify!($name), rows!(@grows $kind), concat!($($doc),*)),)*)*]
    };
    (@grows count) => { true };
    (@grows total) => { true };
    (@grows $kind:ident) => { false };
}

const TIER: &[Row] = farheap::for_region_stats!(rows);
const POOL: &[Row] = farheap::for_pool_stats!(rows);
const MANAGER: &[Row] = farheap::for_manager_stats!(rows);
const CONSUMER: &[Row] = farheap::for_consumer_stats!(rows);

/// Numbers of the process, which are in no table of farheap's.
const PROCESS: [Row; 1] =
    [("process_resident_bytes", false, "Resident bytes of the process, far memory included.")];

/// Numbers that a heap adds to those of its tiers' regions.
const HEAP: [Row; 3] = [
    ("allocated_bytes", false, "Bytes of the blocks that are allocated in the tier."),
    ("local_bytes", false, "Resident bytes of local memory, the same for all tiers."),
    ("process_limit_bytes", false, "The limit of the whole process, where it has one."),
];

/// `ServerStats` of farheap.
const SERVER: [Row; 12] = [
    ("state", false, "0: up, 1: lost, 2: taken by another client, or empty."),
    ("reads", true, "Reads that the server answered."),
    ("writes", true, "Writes that the server answered."),
    ("errors", true, "Requests that the server refused."),
    ("in_flight", false, "Requests at the server now."),
    ("breaks", true, "Connections that broke."),
    ("connections", true, "Connections that were made."),
    (
        "hedges",
        true,
        "Reads that the server had because another was late; with parity, that it was late for.",
    ),
    ("rebuilt", true, "Blocks of the server computed from those of others."),
    ("lacking_bytes", false, "Bytes that the server lacks and that other servers have."),
    ("copied_bytes", true, "Bytes copied to the server because it lacked them."),
    ("barred_bytes", false, "Bytes that are not used again because a late write may reach them."),
];

/// Names of the statistic, of what takes the time, and the quantile.
const TIER_LATENCIES: [(&str, &str, &str); 12] = [
    ("fault_ns_p50", "fault", "0.5"),
    ("fault_ns_p99", "fault", "0.99"),
    ("fault_ns_max", "fault", "1"),
    ("read_ns_p50", "read", "0.5"),
    ("read_ns_p99", "read", "0.99"),
    ("read_ns_max", "read", "1"),
    ("write_ns_p50", "write", "0.5"),
    ("write_ns_p99", "write", "0.99"),
    ("write_ns_max", "write", "1"),
    ("evict_ns_p50", "evict", "0.5"),
    ("evict_ns_p99", "evict", "0.99"),
    ("evict_ns_max", "evict", "1"),
];

const SERVER_LATENCIES: [(&str, &str, &str); 3] = [
    ("read_ns_p50", "read", "0.5"),
    ("read_ns_p95", "read", "0.95"),
    ("read_ns_p99", "read", "0.99"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_name_has_one_kind_and_one_subject() {
        let mut kinds = BTreeMap::new();
        for subject in MetricSubject::ALL {
            for metric in subject.metrics() {
                let kind = std::mem::discriminant(&metric.kind);
                let before = kinds.insert(metric.name.as_str(), (subject, kind));
                let is_summary = matches!(metric.kind, MetricKind::Quantile(_));
                assert!(before.is_none_or(|before| is_summary && before == (subject, kind)));
                assert_eq!(
                    metric.name.ends_with("_total"),
                    metric.kind == MetricKind::Counter,
                    "{metric:?}"
                );
                assert!(metric.help.trim().ends_with('.'), "{metric:?}");
            }
        }
        assert!(kinds.len() > 90, "{}", kinds.len());
    }

    #[test]
    fn units_stand_at_the_end_of_names() {
        let find = |subject: MetricSubject, statistic: &str| {
            let found = subject.metrics().iter().find(|metric| metric.statistic == statistic);
            found.map(|metric| (metric.name.as_str(), metric.unit)).expect("a statistic")
        };
        assert_eq!(
            find(MetricSubject::Tier, "bytes_read"),
            ("farheap_read_bytes_total", Unit::Bytes)
        );
        assert_eq!(
            find(MetricSubject::Manager, "used_bytes_max"),
            ("farheap_manager_used_max_bytes", Unit::Bytes)
        );
        assert_eq!(
            find(MetricSubject::Manager, "reclaimed_free_bytes"),
            ("farheap_manager_reclaimed_free_bytes_total", Unit::Bytes)
        );
        assert_eq!(
            find(MetricSubject::Tier, "fault_ns_p99"),
            ("farheap_fault_latency_seconds", Unit::Seconds)
        );
        assert_eq!(find(MetricSubject::Pool, "misses"), ("farheap_pool_misses_total", Unit::Count));
    }
}
