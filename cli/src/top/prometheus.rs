//! The numbers of processes in Prometheus' text format, by its conventions: base units, `_total` for what only counts.
//!
//! Only numbers that the library has are in it, each once: one text that is not as it should be would cost a collector the
//! numbers of all.

use super::TierReport;
use farheap::ByteCount;
use farheap_metrics::names::{Metric, MetricKind, MetricSubject};
use farheap_nbd::SERVERS_MAX;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Samples by the names of their metrics.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    metrics: BTreeMap<&'static str, Samples>,
}

/// All samples of a metric.
#[derive(Debug)]
struct Samples {
    metric: &'static Metric,
    /// Values by labels.
    values: BTreeMap<String, String>,
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
        let pid = format!("pid=\"{pid}\"");
        let labels = format!("{pid},program=\"{}\"", quoted(program));
        self.add_values(MetricSubject::Process, &labels, |_| Some(resident.0));
        for tier in tiers {
            let labels = format!("{pid},tier=\"{}\"", tier.name);
            let value = |name: &str| tier.values.get(name).copied();
            self.add_values(MetricSubject::Tier, &labels, value);
            for at in 0..SERVERS_MAX {
                let labels = format!("{labels},server=\"{at}\"");
                self.add_values(MetricSubject::Server, &labels, |name| {
                    value(&format!("server{at}_{name}"))
                });
            }
        }
    }

    /// Adds a sample of each metric of a subject that has a value, unless there is one with these labels: two tiers of a
    /// name are one too many.
    fn add_values(
        &mut self,
        subject: MetricSubject,
        labels: &str,
        value: impl Fn(&'static str) -> Option<u64>,
    ) {
        for metric in subject.metrics() {
            let Some(value) = value(metric.statistic) else { continue };
            let (labels, value) = match metric.kind {
                MetricKind::Quantile(part) => {
                    (format!("{labels},quantile=\"{part}\""), metric.value(value).to_string())
                }
                _ => (labels.to_owned(), value.to_string()),
            };
            let samples = self.metrics.entry(metric.name.as_str());
            let samples = samples.or_insert(Samples { metric, values: BTreeMap::new() });
            samples.values.entry(labels).or_insert(value);
        }
    }

    /// The text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, Samples { metric, values }) in &self.metrics {
            let kind = match metric.kind {
                MetricKind::Counter => "counter",
                MetricKind::Quantile(_) => "summary",
                _ => "gauge",
            };
            let help = metric.help.trim();
            // Writing into a string does not fail, here and below.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        text
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
