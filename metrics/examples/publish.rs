//! An engine's numbers as Prometheus reads them: `cargo run -p farheap-metrics --example publish`.
//!
//! The exporter here only makes the text; by its feature `http-listener` it serves it.

use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use metrics_exporter_prometheus::PrometheusBuilder;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let exporter = PrometheusBuilder::new().install_recorder()?;

    let manager = MemoryManager::start(ByteCount::mib(8))?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("orders");
    let pool = PoolConfig::new().create(path, ByteCount::mib(64), &manager)?;

    // Numbers are at most ten seconds old from now on.
    let publishing = farheap_metrics::every(Duration::from_secs(10), {
        let (manager, pool) = (Arc::clone(&manager), Arc::clone(&pool));
        move || {
            farheap_metrics::publish_manager("engine", &manager);
            farheap_metrics::publish_pool("orders", &pool);
            farheap_metrics::publish_heap(); // Of far heaps, if some run.
        }
    })?;

    // The engine's work: 12 MiB of pages under a limit of 8.
    for _ in 0..3072 {
        pool.allocate()?.fill(1);
    }
    drop(publishing); // Publishes the last numbers.

    let text = exporter.render();
    for metric in ["farheap_pool_pages_written_total", "farheap_manager_used_bytes"] {
        let sample = text.lines().find(|line| line.starts_with(metric));
        println!("{}", sample.ok_or("the metric is not exported")?);
    }
    Ok(())
}
