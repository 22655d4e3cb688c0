//! `tune`: which settings suit the machine, by random read faults.
//!
//! Prints one line a combination of page size, install path, handlers and spinning; the library's
//! defaults are chosen by this table (`docs/design/faults.md`).

use crate::device::LoopDevice;
use crate::far::{self, Far};
use crate::report::median;
use crate::work::{Mix, Order, access_timed};
use crate::{Failure, Plan, Result, Side, take_turns};
use farheap::region::{Install, RegionConfig};
use farheap::store::Store;
use hdrhistogram::Histogram;
use std::sync::Arc;
use std::time::Duration;

const PAGES: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];
const INSTALLS: [(Install, &str); 3] =
    [(Install::Auto, "auto"), (Install::Copy, "copy"), (Install::Move, "move")];
const HANDLERS: [usize; 2] = [1, 2];
const SPINS_US: [u64; 3] = [0, 20, 100];

pub(crate) fn run(plan: &Plan) -> Result<()> {
    let plan = Plan {
        data: (plan.data / 8).max(64 << 20),
        cache: (plan.cache / 8).max(8 << 20),
        rounds: plan.rounds.min(3),
        ..plan.clone()
    };
    println!(
        "random reads, {} MiB of data, cache {} MiB: k/s at {:?} threads, and at 1 thread",
        plan.data >> 20,
        plan.cache >> 20,
        plan.threads
    );
    println!("processor time and latency of a miss in us\n");
    print!("{:7} {:>6} {:7} {:>8} {:>7} ", "store", "page", "install", "handlers", "spin us");
    plan.threads.iter().for_each(|threads| print!("{:>9} ", format!("{threads} thr")));
    println!("{:>7} {:>7} {:>7}", "cpu us", "p50", "p99");
    for page in PAGES {
        sweep(&plan, "memory", page, &|| far::memory_store(plan.data))?;
    }
    let device = LoopDevice::create(far::device_bytes(plan.data))?;
    for page in PAGES {
        sweep(&plan, "loop", page, &|| far::device_store(device.path()))?;
    }
    Ok(())
}

fn sweep(
    plan: &Plan,
    name: &str,
    page: usize,
    store: &dyn Fn() -> Result<Arc<dyn Store>>,
) -> Result<()> {
    for (install, install_name) in INSTALLS {
        for handlers in HANDLERS {
            for spin_us in SPINS_US {
                let config = RegionConfig {
                    install,
                    handlers,
                    spin: Duration::from_micros(spin_us),
                    ..far::config(page, plan.cache, plan.data)
                };
                print!("{name:7} {:>5}K {install_name:7} {handlers:>8} {spin_us:>7} ", page >> 10);
                match measure(plan, config, store()?) {
                    Err(Failure::Skipped(why)) => println!("skipped: {why}"),
                    outcome => outcome?,
                }
            }
        }
    }
    Ok(())
}

/// Measures one combination and prints the rest of its line.
fn measure(plan: &Plan, config: RegionConfig, store: Arc<dyn Store>) -> Result<()> {
    let page = config.page.as_usize();
    let far = Far::stored(config, store, plan.data)?;
    for &threads in &plan.threads {
        let mut mix = Mix::new(Order::Random, plan.data, page, threads);
        let side: Side<'_> = Box::new(|time| mix.access(far.words, time));
        let samples = take_turns(plan, &mut [side])?.remove(0);
        let rate = median(samples.iter().map(|sample| sample.rate() / 1e3).collect());
        print!("{rate:>9.1} ");
    }
    let mut latencies = Histogram::<u64>::new(3).expect("three digits are supported");
    let mut mix = Mix::new(Order::Perm, plan.data, page, 1);
    let side: Side<'_> =
        Box::new(|time| Ok(access_timed(far.words, &mut mix, time, &mut latencies)));
    let samples = take_turns(plan, &mut [side])?.remove(0);
    let cpu = median(samples.iter().map(|sample| sample.cpu_secs / sample.count * 1e6).collect());
    let us = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    println!("{cpu:>7.1} {:>7.1} {:>7.1}", us(0.5), us(0.99));
    Ok(())
}
