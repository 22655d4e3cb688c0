//! Every statistic arrives at a recorder under its metric's name, and the dashboard shows nothing else.

#[path = "../../network/tests/common/mod.rs"]
mod servers;

use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use farheap::{ByteCount, Error, Heap};
use farheap_metrics::names::{MetricKind, MetricSubject};
use metrics::Label;
use metrics_util::MetricKind as Recorded;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use servers::{Announced, TestServer};
use std::collections::{BTreeMap, BTreeSet};

/// Values by the names and labels of metrics, such as `name{tier="far"}`.
type Samples = BTreeMap<String, f64>;

/// The samples that the recorder has; fails where a metric has another kind or unit than the table of names says.
fn samples(snapshotter: &Snapshotter) -> Samples {
    let known: BTreeMap<&str, _> = MetricSubject::ALL
        .iter()
        .flat_map(|subject| subject.metrics())
        .map(|metric| (metric.name.as_str(), metric))
        .collect();
    let mut found = Samples::new();
    for (key, unit, help, value) in snapshotter.snapshot().into_vec() {
        let (kind, key) = key.into_parts();
        let metric = known[key.name()];
        let is_counter = metric.kind == MetricKind::Counter;
        assert_eq!(kind == Recorded::Counter, is_counter, "{key}");
        assert_eq!((unit, help.as_deref()), (Some(metric.unit), Some(metric.help.trim())), "{key}");
        let value = match value {
            DebugValue::Counter(value) => value as f64,
            DebugValue::Gauge(value) => value.0,
            DebugValue::Histogram(_) => panic!("{key} is a histogram"),
        };
        let label = |label: &Label| format!("{}=\"{}\"", label.key(), label.value());
        let labels: Vec<String> = key.labels().map(label).collect();
        found.insert(format!("{}{{{}}}", key.name(), labels.join(",")), value);
    }
    found
}

/// Checks that each statistic of a subject is there, with its value where it does not change by itself.
fn check(
    samples: &Samples,
    subject: MetricSubject,
    labels: &str,
    values: impl IntoIterator<Item = (&'static str, u64)>,
) {
    let mut count = 0;
    for (statistic, value) in values {
        let mut all = subject.metrics().iter();
        let metric = all.find(|metric| metric.statistic == statistic).expect("a metric");
        let quantile = match metric.kind {
            MetricKind::Quantile(part) => format!(",quantile=\"{part}\""),
            _ => String::new(),
        };
        let name = format!("{}{{{labels}{quantile}}}", metric.name);
        let found = samples.get(&name).unwrap_or_else(|| panic!("no {name} in {samples:?}"));
        assert_eq!(*found, metric.value(value), "{name}");
        count += 1;
    }
    assert!(count > 0, "{subject:?} has statistics");
}

/// Names of metrics that the dashboard asks for.
fn shown(dashboard: &serde_json::Value) -> BTreeSet<String> {
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut names = BTreeSet::new();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{panel}");
        for target in targets {
            let expression = target["expr"].as_str().expect("an expression");
            let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let own: Vec<&str> = words.filter(|word| word.starts_with("farheap_")).collect();
            assert!(!own.is_empty(), "{expression}");
            names.extend(own.into_iter().map(str::to_owned));
        }
    }
    names
}

#[test]
fn every_statistic_arrives_under_its_name_and_the_dashboard_shows_no_other() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().expect("no other recorder is installed");
    farheap_metrics::describe();

    let options = "limit:256MiB,capacity:64MiB,threshold:off";
    let heap = match Heap::builder().parse(options).expect("options").start() {
        Ok(heap) => heap,
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let server = TestServer::start(Announced { size: 80 << 20, ..Announced::default() });
    let options = format!("far_limit:8MiB,device:\"{}\"", server.address);
    let tier = Heap::builder().parse(&options).expect("options");
    let cold = heap.add_tier("cold", tier).expect("a tier");
    let mut numbers = allocator_api2::vec::Vec::new_in(cold.tier());
    numbers.extend(0..4_u64 << 20); // 32 MiB, of which 8 stay.
    assert_eq!(numbers.iter().sum::<u64>() % 7, (0..4_u64 << 20).sum::<u64>() % 7);

    let manager = MemoryManager::start(ByteCount::mib(16)).expect("a manager");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("table");
    let pool = PoolConfig::new().create(&path, ByteCount::mib(64), &manager).expect("a pool");
    for _ in 0..3000 {
        drop(pool.allocate().expect("a page")); // More than the limit has room for.
    }
    pool.flush().expect("a working disk");

    // Evictors go on for a while after the last access: published between two snapshots that are the same.
    let look = || (cold.stats(), pool.stats(), manager.stats(), manager.consumers());
    let mut before = look();
    let mut tries = 0;
    let found = loop {
        farheap_metrics::publish_heap();
        farheap_metrics::publish_pool("table", &pool);
        farheap_metrics::publish_manager("engine", &manager);
        let after = look();
        if after == before {
            break samples(&snapshotter);
        }
        before = after;
        tries += 1;
        assert!(tries < 3000, "the numbers never stay: {before:?}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let (of_tier, of_pool, of_manager, consumers) = before;
    check(&found, MetricSubject::Tier, "tier=\"cold\"", of_tier.iter());
    check(&found, MetricSubject::Pool, "pool=\"table\"", of_pool.iter());
    check(&found, MetricSubject::Manager, "manager=\"engine\"", of_manager.iter());
    for (name, stats) in consumers {
        let labels = format!("manager=\"engine\",consumer=\"{name}\"");
        check(&found, MetricSubject::Consumer, &labels, stats.iter());
    }
    let value = |name: &str| found[name];
    assert!(value("farheap_faults_read_total{tier=\"cold\"}") > 0.0, "{found:?}");
    assert!(value("farheap_written_bytes_total{tier=\"cold\"}") > 24e6, "{found:?}");
    assert_eq!(value("farheap_process_limit_bytes{tier=\"far\"}"), f64::from(256 << 20));
    assert!(!found.contains_key("farheap_process_limit_bytes{tier=\"cold\"}"), "{found:?}");
    assert_eq!(value("farheap_allocated_bytes{tier=\"cold\"}"), f64::from(32 << 20));
    assert!(value("farheap_process_resident_bytes{}") > 1e6);
    let latency = value("farheap_fault_latency_seconds{tier=\"cold\",quantile=\"1\"}");
    assert!(latency > 0.0 && latency < 600.0, "{latency} is in seconds");
    assert!(value("farheap_server_reads_total{tier=\"cold\",server=\"0\"}") > 0.0);
    assert!(value("farheap_pool_pages_written_total{pool=\"table\"}") > 0.0);

    let published: BTreeSet<&str> =
        found.keys().map(|sample| sample.split('{').next().expect("a name")).collect();
    let table = MetricSubject::ALL.iter().flat_map(|subject| subject.metrics());
    let missing: Vec<&str> =
        table.map(|metric| metric.name.as_str()).filter(|name| !published.contains(name)).collect();
    assert_eq!(missing, Vec::<&str>::new(), "never published");
    let text = include_str!("../../docs/grafana.json");
    let dashboard = serde_json::from_str(text).expect("JSON");
    let shown = shown(&dashboard);
    assert!(shown.len() >= 25, "{shown:?}");
    let unknown: Vec<&String> =
        shown.iter().filter(|name| !published.contains(name.as_str())).collect();
    assert_eq!(unknown, Vec::<&String>::new(), "shown by the dashboard and not exported");

    drop(numbers);
    cold.shutdown().expect("nothing is in use");
    heap.shutdown().expect("nothing is in use");
}

#[test]
fn a_thread_publishes_at_once_and_once_more_at_its_end() {
    let (send, received) = std::sync::mpsc::channel();
    let publishing = farheap_metrics::every(std::time::Duration::from_secs(3600), move || {
        send.send(()).expect("the test waits");
    });
    let publishing = publishing.expect("a thread");
    received.recv().expect("published at once");
    drop(publishing);
    assert_eq!(received.iter().count(), 1, "published once more, and the thread has ended");
}
