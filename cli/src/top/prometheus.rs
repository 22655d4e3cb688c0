//! The numbers of processes in Prometheus' text format, by its conventions: base units, `_total` for what only counts.
//!
//! Only numbers that the library has are in it, each once: one text that is not as it should be would cost a collector the
//! numbers of all.

use super::TierReport;
use farheap::{ByteCount, Stats};
use farheap_nbd::{SERVERS_MAX, ServerStats};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Numbers of a tier's text that are not statistics of its region.
const OF_THE_TEXT: [&str; 3] = ["allocated_bytes", "local_bytes", "process_limit_bytes"];
/// Latencies of a tier's text, and the ends of their names with the quantiles that they are.
const LATENCIES: [&str; 4] = ["fault", "read", "write", "evict"];
const QUANTILES: [(&str, &str); 3] = [("_ns_p50", "0.5"), ("_ns_p99", "0.99"), ("_ns_max", "1")];

/// Samples by the names of their metrics.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    metrics: BTreeMap<String, Metric>,
}

/// All samples of a metric.
#[derive(Debug)]
struct Metric {
    kind: &'static str,
    help: String,
    /// Values by labels.
    samples: BTreeMap<String, String>,
}

impl Exposition {
    /// Adds the numbers of a process.
    pub(super) fn add(
        &mut self,
        pid: u32,
        program: &str,
        resident: ByteCount,
        tiers: &[TierReport],
    ) {
        let labels = format!("pid=\"{pid}\",program=\"{}\"", quoted(program));
        let help = "VmRSS of the process".to_owned();
        self.sample("process_resident_bytes", "gauge", help, labels, resident.0.to_string());
        for tier in tiers {
            let labels = format!("pid=\"{pid}\",tier=\"{}\"", tier.name);
            let names = Stats::default().iter().map(|(name, _)| name).collect::<Vec<_>>();
            for name in names.into_iter().chain(OF_THE_TEXT) {
                if let Some(value) = tier.values.get(name) {
                    let (metric, kind) = metric(name);
                    let help = format!("Statistic {name} of a tier");
                    self.sample(&metric, kind, help, labels.clone(), value.to_string());
                }
            }
            for name in LATENCIES {
                for (end, quantile) in QUANTILES {
                    if let Some(ns) = tier.values.get(&format!("{name}{end}")) {
                        let help = format!("Latency of {name} in a tier since its start");
                        let labels = format!("{labels},quantile=\"{quantile}\"");
                        let seconds = (*ns as f64 / 1e9).to_string();
                        let metric = format!("{name}_latency_seconds");
                        self.sample(&metric, "summary", help, labels, seconds);
                    }
                }
            }
            (0..SERVERS_MAX).for_each(|at| self.add_server(&labels, tier, at));
        }
    }

    /// Adds the numbers of a server that a tier's pages are on, if there is one.
    fn add_server(&mut self, labels: &str, tier: &TierReport, at: usize) {
        for (name, _) in ServerStats::default().iter() {
            let Some(value) = tier.values.get(&format!("server{at}_{name}")) else { continue };
            let labels = format!("{labels},server=\"{at}\"");
            if let Some(Ok(percent)) = name.strip_prefix("read_ns_p").map(str::parse::<u32>) {
                let labels = format!("{labels},quantile=\"{}\"", f64::from(percent) / 100.0);
                let help = "Latency of late of reads from a server of a tier".to_owned();
                let seconds = (*value as f64 / 1e9).to_string();
                self.sample("server_read_latency_seconds", "summary", help, labels, seconds);
                continue;
            }
            let (metric, kind) = match name {
                "state" => ("server_state".to_owned(), "gauge"),
                "copied_bytes" => ("server_copied_bytes_total".to_owned(), "counter"),
                _ => metric(&format!("server_{name}")),
            };
            let help = format!("Count {name} of a server of a tier");
            self.sample(&metric, kind, help, labels, value.to_string());
        }
    }

    /// Adds a sample, unless there is one with these labels: two tiers of a name are one too many.
    fn sample(
        &mut self,
        name: &str,
        kind: &'static str,
        help: String,
        labels: String,
        value: String,
    ) {
        let new = || Metric { kind, help, samples: BTreeMap::new() };
        let metric = self.metrics.entry(format!("farheap_{name}")).or_insert_with(new);
        metric.samples.entry(labels).or_insert(value);
    }

    /// The text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, Metric { kind, help, samples }) in &self.metrics {
            // Writing into a string does not fail, here and below.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        text
    }
}

/// The name and kind of the metric of a statistic: bytes and requests of the moment are gauges, all else counts.
fn metric(name: &str) -> (String, &'static str) {
    if let Some(of) = name.strip_suffix("_bytes_max") {
        (format!("{of}_max_bytes"), "gauge")
    } else if ["_bytes", "_in_flight", "_in_flight_max"].iter().any(|end| name.ends_with(end)) {
        (name.to_owned(), "gauge")
    } else if let Some(way) = name.strip_prefix("bytes_") {
        (format!("{way}_bytes_total"), "counter")
    } else {
        (format!("{name}_total"), "counter")
    }
}

/// A label's value: a process names itself as it likes.
fn quoted(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_processes_give_themselves_stay_within_their_quotation_marks() {
        let mut exposition = Exposition::default();
        exposition.add(7, "a\"b\\c\nd", ByteCount(5), &[]);
        let line = "\nfarheap_process_resident_bytes{pid=\"7\",program=\"a\\\"b\\\\c\\nd\"} 5\n";
        assert!(exposition.text().ends_with(line), "{}", exposition.text());
    }

    #[test]
    fn servers_are_told_apart_by_a_label() {
        let names =
            ["server0_reads", "server1_reads", "server1_read_ns_p95", "server1_copied_bytes"];
        let values = names.map(|name| (name.to_owned(), 5_000_000));
        let tier = TierReport { name: "far".to_owned(), values: BTreeMap::from(values) };
        let mut exposition = Exposition::default();
        exposition.add(7, "a", ByteCount(5), &[tier]);
        let text = exposition.text();
        for line in [
            "farheap_server_reads_total{pid=\"7\",tier=\"far\",server=\"0\"} 5000000\n",
            "farheap_server_read_latency_seconds{pid=\"7\",tier=\"far\",server=\"1\",quantile=\"0.95\"} 0.005\n",
            "# TYPE farheap_server_copied_bytes_total counter\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn a_second_tier_of_a_name_is_left_out() {
        let tier = |value| TierReport {
            name: "far".to_owned(),
            values: BTreeMap::from([("faults_read".to_owned(), value)]),
        };
        let mut exposition = Exposition::default();
        exposition.add(7, "a", ByteCount(5), &[tier(1), tier(2)]);
        let text = exposition.text();
        assert!(text.contains("# TYPE farheap_faults_read_total counter\n"), "{text}");
        assert_eq!(text.matches("\nfarheap_faults_read_total{").count(), 1, "{text}");
    }
}
