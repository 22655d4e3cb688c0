//! Publishes farheap's statistics through the [`metrics`] facade.
//!
//! For [farheap], a heap larger than RAM. The program installs a recorder, an exporter of its choice, and calls the
//! functions here whenever numbers are to be fresh: before a scrape, or from a thread ([`every`]). Names and units are
//! those of `farheap top --prometheus` ([`names`]), so a dashboard made for one shows the other;
//! `docs/grafana.json` in the repository is one.
//!
//! | function | metrics | labels |
//! |---|---|---|
//! | [`publish_heap`] | `farheap_process_resident_bytes`; of each tier, as below | none; `tier` |
//! | [`publish_region`] | `farheap_resident_bytes`, `farheap_faults_read_total`, ... | `tier`; for a latency `quantile` |
//! | the same, with feature `network` | `farheap_server_reads_total`, ... | `tier`, `server` |
//! | [`publish_pool`] | `farheap_pool_misses_total`, ... | `pool` |
//! | [`publish_manager`] | `farheap_manager_used_bytes`, ... | `manager` |
//! | the same | `farheap_consumer_used_bytes`, ... | `manager`, `consumer` |
//!
//! # Limits
//! 1. Latencies are gauges with the label `quantile`: farheap keeps quantiles, not the durations that a histogram takes.
//! 2. Two subjects of one name are one to a recorder: of a gauge the last value published stays, of a counter the
//!    largest. Counters of a pool that is opened anew stand still until they are above those before; a name of its own,
//!    such as a number, avoids that.
//! 3. A recorder keeps the last numbers of what is gone, such as a consumer that left, until its idle timeout.
//!
//! # Examples
//! ```
//! use farheap::ByteCount;
//! use farheap::manager::MemoryManager;
//!
//! let manager = MemoryManager::start(ByteCount::mib(64))?;
//! farheap_metrics::describe(); // Once, after the recorder is installed.
//! farheap_metrics::publish_manager("engine", &manager);
//! # Ok::<(), farheap::Error>(())
//! ```
//!
//! [farheap]: https://docs.rs/farheap

/// Its program is compiled as those of this page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod names;

use farheap::manager::MemoryManager;
use farheap::pool::BufferPool;
use farheap::region::{Latency, Region};
use farheap::{Heap, Local};
use metrics::Label;
use names::{MetricKind, MetricSubject};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};

/// Gives the recorder units and meanings of all metrics: once, after it is installed.
pub fn describe() {
    for metric in MetricSubject::ALL.iter().flat_map(|subject| subject.metrics()) {
        let (name, unit, help) = (metric.name.as_str(), metric.unit, metric.help.trim());
        match metric.kind {
            MetricKind::Counter => metrics::describe_counter!(name, unit, help),
            _ => metrics::describe_gauge!(name, unit, help),
        }
    }
}

/// Publishes the numbers of all tiers of the heaps that run, and the resident memory of the process.
///
/// Publishes nothing before a heap runs. Takes jemalloc's locks for a moment, as [`Heap::usage`] does.
pub fn publish_heap() {
    let tiers = Heap::tiers();
    let local = Local::usage().resident_bytes.0;
    for tier in &tiers {
        publish_region(tier.name(), tier.region());
        let allocated = tier.usage().allocated_bytes.0;
        let of_the_heap = [("allocated_bytes", allocated), ("local_bytes", local)];
        let limit = tier.limit().map(|limit| ("process_limit_bytes", limit.0));
        publish(
            MetricSubject::Tier,
            &[("tier", tier.name())],
            of_the_heap.into_iter().chain(limit),
        );
    }
    if let Some(bytes) = resident_bytes().filter(|_| !tiers.is_empty()) {
        publish(MetricSubject::Process, &[], [("process_resident_bytes", bytes)]);
    }
}

/// Publishes the numbers of a region under a name: its statistics, its latencies, and those of servers that it is on.
pub fn publish_region(name: &str, region: &Region) {
    let labels = [("tier", name)];
    publish(MetricSubject::Tier, &labels, region.stats().iter());
    let times = region.latencies();
    let numbers = |[p50, p99, max]: [&'static str; 3], of: &Latency| {
        [(p50, of.p50), (p99, of.p99), (max, of.max)]
    };
    let latencies = [
        numbers(["fault_ns_p50", "fault_ns_p99", "fault_ns_max"], &times.fault),
        numbers(["read_ns_p50", "read_ns_p99", "read_ns_max"], &times.read),
        numbers(["write_ns_p50", "write_ns_p99", "write_ns_max"], &times.write),
        numbers(["evict_ns_p50", "evict_ns_p99", "evict_ns_max"], &times.evict),
    ];
    publish(MetricSubject::Tier, &labels, latencies.into_iter().flatten());
    #[cfg(feature = "network")]
    for (at, server) in region.servers().enumerate() {
        publish(
            MetricSubject::Server,
            &[("tier", name), ("server", &at.to_string())],
            server.iter(),
        );
    }
}

/// Publishes the numbers of a buffer pool under a name.
pub fn publish_pool(name: &str, pool: &BufferPool) {
    publish(MetricSubject::Pool, &[("pool", name)], pool.stats().iter());
}

/// Publishes the numbers of a memory manager and of its consumers under a name.
pub fn publish_manager(name: &str, manager: &MemoryManager) {
    publish(MetricSubject::Manager, &[("manager", name)], manager.stats().iter());
    for (consumer, stats) in manager.consumers() {
        let labels = [("manager", name), ("consumer", &*consumer)];
        publish(MetricSubject::Consumer, &labels, stats.iter());
    }
}

/// Sets the metrics of a subject to values of its statistics. A statistic without a metric is left out: none is, or the
/// tests fail.
fn publish(
    subject: MetricSubject,
    labels: &[(&'static str, &str)],
    values: impl IntoIterator<Item = (&'static str, u64)>,
) {
    for (statistic, value) in values {
        let mut all = subject.metrics().iter();
        let Some(metric) = all.find(|metric| metric.statistic == statistic) else { continue };
        let name = metric.name.as_str();
        let mut labels: Vec<Label> =
            labels.iter().map(|&(label, value)| Label::new(label, value.to_owned())).collect();
        match metric.kind {
            MetricKind::Counter => metrics::counter!(name, labels).absolute(value),
            MetricKind::Gauge => metrics::gauge!(name, labels).set(metric.value(value)),
            MetricKind::Quantile(quantile) => {
                labels.push(Label::from_static_parts("quantile", quantile));
                metrics::gauge!(name, labels).set(metric.value(value));
            }
        }
    }
}

/// Resident bytes of this process.
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// A thread that publishes. It ends when this is dropped, after having published once more.
#[derive(Debug)]
pub struct Publishing {
    /// Taken to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a thread that [describes](describe) the metrics, and publishes now and whenever the time has passed.
///
/// `publish` calls the functions above for what is to be published.
///
/// # Errors
/// [`InvalidInput`](io::ErrorKind::InvalidInput) for a time of zero; the kernel's, if it has no room for a thread.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// let publishing = farheap_metrics::every(Duration::from_secs(10), farheap_metrics::publish_heap)?;
/// // The program works; then:
/// drop(publishing);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn every(time: Duration, mut publish: impl FnMut() + Send + 'static) -> io::Result<Publishing> {
    // The thread would publish without a pause, and jemalloc's locks with it.
    if time.is_zero() {
        let reason =
            "metrics cannot be published every 0 s: take a time such as Duration::from_secs(10)";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let (stop, stopped) = channel();
    let thread = thread::Builder::new().name("farheap-metrics".to_owned()).spawn(move || {
        describe();
        publish();
        while stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
            publish();
        }
        publish();
    })?;
    Ok(Publishing { stop: Some(stop), thread: Some(thread) })
}

impl Drop for Publishing {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        // A panic of `publish` is the program's, and its message was printed.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_zero_is_refused_and_nothing_is_published() {
        let refused = every(Duration::ZERO, || panic!("nothing is to be published"));
        let error = refused.expect_err("a thread would publish without a pause");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("Duration::from_secs(10)"), "{error}");
    }
}
