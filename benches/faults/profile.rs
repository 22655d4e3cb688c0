//! `profile`: where the time of a fault goes, by thread, for tools that look from the outside.
//!
//! Runs random read faults for `--seconds`, or pages asked for in batches of `--batch`, and prints
//! what each thread used: processor time, time it was ready and waited for a processor, and
//! switches. Run it under `perf record` or
//! `strace -c -f` (whose counts include the set-up: compare two lengths).

use crate::device::LoopDevice;
use crate::far::{self, Far};
use crate::rows::prefetched;
use crate::work::{Mix, Order};
use crate::{Args, Failure, Plan, Result};
use farheap::region::{FaultMode, RegionConfig};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// What a thread has used so far.
#[derive(Clone, Debug, Default)]
struct Usage {
    name: String,
    run_us: f64,
    ready_us: f64,
    slept: f64,
    preempted: f64,
}

/// Usage of all threads by id.
fn usages() -> BTreeMap<u32, Usage> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0.0)
        };
        let times: Vec<f64> =
            read("schedstat").split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let usage = Usage {
            name: read("comm").trim().to_owned(),
            run_us: times.first().map_or(0.0, |ns| ns / 1e3),
            ready_us: times.get(1).map_or(0.0, |ns| ns / 1e3),
            slept: field("voluntary_ctxt_switches:"),
            preempted: field("nonvoluntary_ctxt_switches:"),
        };
        if let Ok(id) = entry.file_name().to_string_lossy().parse() {
            found.insert(id, usage);
        }
    }
    found
}

/// The settings that the command line asks for.
fn config(plan: &Plan, args: &Args) -> RegionConfig {
    let config = far::config(plan.cache, plan.data);
    let poll = args.poll.map_or(config.poll, |us| Some(Duration::from_micros(us)));
    let handlers = args.handlers.unwrap_or(config.handlers);
    let mode = if args.in_thread { FaultMode::InThread } else { FaultMode::Auto };
    config.poll(poll).handlers(handlers).mode(mode)
}

pub(crate) fn run(plan: &Plan, args: &Args) -> Result<()> {
    let asked = |place: &&str| args.filters.iter().any(|word| word == place);
    let place = ["loop", "file"].into_iter().find(asked).unwrap_or("memory");
    let device = (place == "loop").then(|| LoopDevice::create(far::device_bytes(plan.data)));
    let device = device.transpose()?;
    let store = match (&device, place) {
        (Some(device), _) => far::device_store(device.path())?,
        (None, "file") => far::file_store(&plan.dir, plan.data)?,
        (None, _) => far::memory_store(plan.data)?,
    };
    let far = Far::stored(config(plan, args), store, plan.data)?;
    eprintln!("set up");
    for &threads in &plan.threads {
        let mut mix = Mix::new(Order::Perm, plan.data, threads).with_writes(args.writes);
        let mut work = |time| match args.batch {
            Some(batch) => prefetched(&far, &mut mix, batch, time),
            None => mix.access(far.words, time),
        };
        work(plan.round)?;
        let (before, stats) = (usages(), far.region.stats());
        // A scope ends before its threads' figures can be read: they are this thread's helpers.
        let sample = work(plan.round * plan.rounds as u32)?;
        let (after, now) = (usages(), far.region.stats());
        let faults = (now.pages_in - stats.pages_in) as f64;
        if faults == 0.0 {
            return Err(Failure::Broken("no page came in".to_owned()));
        }
        println!(
            "\n{place} store, {threads} threads: {faults} pages in {:.2} s, \
             {:.1} k/s, {:.2} us CPU and {:.3} read faults a page",
            sample.secs,
            faults / sample.secs / 1e3,
            sample.cpu_secs / faults * 1e6,
            (now.faults_read - stats.faults_read) as f64 / faults,
        );
        println!(
            "a page:  {:<16} {:>8} {:>8} {:>7} {:>9}",
            "", "run us", "ready us", "sleeps", "preempted"
        );
        for (id, usage) in &after {
            let base = before.get(id).cloned().unwrap_or_default();
            println!(
                "         {:<16} {:>8.2} {:>8.2} {:>7.3} {:>9.3}",
                usage.name,
                (usage.run_us - base.run_us) / faults,
                (usage.ready_us - base.ready_us) / faults,
                (usage.slept - base.slept) / faults,
                (usage.preempted - base.preempted) / faults,
            );
        }
        println!("{now:#?}");
    }
    Ok(())
}
