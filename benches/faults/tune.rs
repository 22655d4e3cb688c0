//! `tune`: which settings suit the machine, by random read faults.
//!
//! Prints one line a combination of install path, handlers and looking for
//! answers; what it said is in `book/src/measurements/fault_rates.md`.

use crate::device::LoopDevice;
use crate::far::{self, Far};
use crate::report::median;
use crate::work::{Mix, Order, access_timed, new_latencies};
use crate::{Failure, Plan, Result, Side, take_turns};
use farheap::region::{Install, RegionConfig};
use farheap::store::Store;
use std::sync::Arc;
use std::time::Duration;

/// One combination of settings.
#[derive(Clone, Copy, Debug)]
struct Setting {
    install: Install,
    install_name: &'static str,
    handlers: usize,
    poll_us: u64,
}

/// Copying with the default handlers, and one thing at a time that is different.
const SETTINGS: [Setting; 4] = [
    COPY,
    Setting { handlers: 1, ..COPY },
    Setting { handlers: 4, ..COPY },
    Setting { poll_us: 0, ..COPY },
];

const COPY: Setting =
    Setting { install: Install::Copy, install_name: "copy", handlers: 2, poll_us: 200 };

pub(crate) fn run(plan: &Plan) -> Result<()> {
    let plan = Plan {
        data: (plan.data / 8).max(64 << 20),
        cache: (plan.cache / 8).max(8 << 20),
        rounds: plan.rounds.min(3),
        round: plan.round.min(Duration::from_millis(150)),
        ..plan.clone()
    };
    println!(
        "random reads, {} MiB of data, cache {} MiB: k/s at {:?} threads, and at 1 thread",
        plan.data >> 20,
        plan.cache >> 20,
        plan.threads
    );
    println!("processor time and latency of a miss in us\n");
    print!("{:7} {:7} {:>8} ", "store", "install", "handlers");
    print!("{:>7} ", "poll us");
    plan.threads.iter().for_each(|threads| print!("{:>9} ", format!("{threads} thr")));
    println!("{:>7} {:>7} {:>7}", "cpu us", "p50", "p99");
    sweep(&plan, "memory", &|| far::memory_store(plan.data))?;
    let device = LoopDevice::create(far::device_bytes(plan.data))?;
    sweep(&plan, "loop", &|| far::device_store(device.path()))
}

fn sweep(plan: &Plan, name: &str, store: &dyn Fn() -> Result<Arc<dyn Store>>) -> Result<()> {
    for setting in &SETTINGS {
        let &Setting { install, install_name, handlers, poll_us, .. } = setting;
        let poll = Duration::from_micros(poll_us);
        let base = far::config(plan.cache, plan.data);
        let config = base.install(install).handlers(handlers).poll(poll);
        print!("{name:7} {install_name:7} {handlers:>8} ");
        print!("{poll_us:>7} ");
        match measure(plan, config, store()?) {
            Err(Failure::Skipped(why)) => println!("skipped: {why}"),
            outcome => outcome?,
        }
    }
    Ok(())
}

/// Measures one combination and prints the rest of its line.
fn measure(plan: &Plan, config: RegionConfig, store: Arc<dyn Store>) -> Result<()> {
    let far = Far::stored(config, store, plan.data)?;
    for &threads in &plan.threads {
        let mut mix = Mix::new(Order::Random, plan.data, threads);
        let side: Side<'_> = Box::new(|time| mix.access(far.words, time));
        let samples = take_turns(plan, &mut [side])?.remove(0);
        let rate = median(samples.iter().map(|sample| sample.rate() / 1e3).collect());
        print!("{rate:>9.1} ");
    }
    let mut latencies = new_latencies();
    let mut mix = Mix::new(Order::Perm, plan.data, 1);
    let side: Side<'_> =
        Box::new(|time| Ok(access_timed(far.words, &mut mix, time, &mut latencies)));
    let samples = take_turns(plan, &mut [side])?.remove(0);
    let cpu = median(samples.iter().map(|sample| sample.cpu_secs / sample.count * 1e6).collect());
    let us = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    println!("{cpu:>7.1} {:>7.1} {:>7.1}", us(0.5), us(0.99));
    Ok(())
}
