//! Everything under one memory manager, against shadow copies: a far heap, a buffer pool with a
//! B-tree, and temporary memory, used by several threads from a printed seed, while the kernel
//! compacts memory and the process is stopped and goes on. Its children, which it forks all the time, have each thread's
//! far blocks as they were at the fork.
//!
//! `FARHEAP_MODEL_SECONDS=3600 cargo test --release --test model` runs every way for so long;
//! `FARHEAP_TEST_SEED` repeats a run's decisions.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod tables;

use blocks::Blocks;
use common::{Dice, StopOnDrop, amount, heap_under, is_root, seed, watchdog};
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use farheap::{ByteCount, FarHeap, Heap, Scope, Tier};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tables::Tables;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

const THREADS: usize = 3;
/// Resident bytes beside the manager's: shadows, stacks, what local memory is counted late.
const BESIDE: u64 = 48 << 20;

/// Local memory that is in use before it is counted.
const COUNTED_LATE: u64 = 8 << 20;

/// Steps of a thread between two forks, on average.
const FORK_EVERY: u64 = 50;

/// What one run consists of.
struct Way {
    conf: &'static str,
    limit: ByteCount,
    /// Forked children have the heap's memory.
    is_inherited: bool,
}

fn way(case: &str) -> Way {
    let (conf, mib) = match case {
        "handler" => ("far_limit:32MiB", 48),
        "in-thread" => ("far_limit:32MiB,mode:in_thread", 48),
        "copy" => ("far_limit:32MiB,install:copy", 48),
        other => panic!("no way is called {other}"),
    };
    let is_inherited = !conf.contains("in_thread") && !conf.contains("copy");
    Way { conf, limit: ByteCount::mib(mib), is_inherited }
}

#[test]
fn nothing_is_lost_under_one_limit() {
    const NAME: &str = "nothing_is_lost_under_one_limit";
    let ways = ["handler", "in-thread", "copy"];
    let Some(case) = common::child::case(NAME) else {
        let seed = seed(NAME);
        for case in ways {
            println!("{case}");
            let ended = common::child::run_for(time(), NAME, case, |command| {
                command.env("FARHEAP_TEST_SEED", seed.to_string());
            });
            ended.expect_success();
            ended.text.lines().filter(|line| line.contains("steps")).for_each(|l| println!("{l}"));
            let lines = ended.text.lines().count();
            assert!(lines <= 60, "{lines} lines of output:\n{}", ended.text);
        }
        return;
    };
    let _watchdog = watchdog(NAME, time() + Duration::from_secs(240));
    model(&way(&case), seed(NAME));
}

/// How long a way runs.
fn time() -> Duration {
    let asked = std::env::var("FARHEAP_MODEL_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(amount(4) as u64))
}

fn model(way: &Way, seed: u64) {
    let manager = MemoryManager::start(way.limit).expect("a manager");
    manager.set_deadline(Duration::from_secs(120));
    let dir = tempfile::tempdir().expect("a directory");
    let conf = format!("{},capacity:2GiB,span:8GiB", way.conf);
    let Some(heap) = heap_under(&manager, &conf) else { return };
    let pool = PoolConfig::new().deadline(Duration::from_secs(120));
    let pool = pool.create(dir.path().join("table"), ByteCount::mib(128), &manager).expect("pool");
    let tables = Tables::new(pool);
    let before = resident();
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let stopper = Stopper::start();
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (heap, manager, tables, stop, steps) = (&heap, &manager, &tables, &stop, &steps);
            scope.spawn(move || {
                // Also when this thread panics: the others would go on for ever.
                let _stop = StopOnDrop(stop);
                let dice = Dice::new(seed ^ thread << 56);
                work(heap, manager, tables, dice, way.is_inherited, stop, steps);
            });
        }
        scope.spawn(|| compact(&stop));
        let began = Instant::now();
        while began.elapsed() < time() && !stop.load(Ordering::Relaxed) {
            let most = before + way.limit.0 + BESIDE;
            let now = resident();
            assert!(now <= most, "{now} bytes are resident, {before} were at the start");
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(stopper);
    tables.check_all();
    let stats = heap.stats();
    println!(
        "{} steps, {} pages out, {} in, {} busy, {} forks, at most {} of {}",
        steps.load(Ordering::Relaxed),
        stats.pages_out,
        stats.pages_in,
        stats.evict_busy,
        blocks::FORKED.load(Ordering::Relaxed),
        manager.stats().used_bytes_max,
        way.limit
    );
    assert_eq!((stats.poisoned, stats.panics, stats.checksum_errors), (0, 0, 0));
    // Local memory is counted after the fact: it alone can exceed the limit, until others gave way.
    let most = ByteCount(way.limit.0 + COUNTED_LATE);
    assert!(manager.stats().used_bytes_max <= most, "{:?}", manager.stats());
    drop(tables);
    heap.shutdown().expect("nothing is in use");
}

/// One thread: its own blocks of far memory, its own keys, pages that all share, and temporary
/// memory.
fn work(
    heap: &Heap,
    manager: &Arc<MemoryManager>,
    tables: &Tables,
    mut dice: Dice,
    forks: bool,
    stop: &AtomicBool,
    steps: &AtomicU64,
) {
    // Shadow copies are local.
    let _local = Scope::enter(Tier::LOCAL);
    let far_bytes = manager.limit().0 * 2 / THREADS as u64;
    let mut blocks = Blocks::new(heap, far_bytes);
    let mut keys = tables.keys(dice.roll());
    while !stop.load(Ordering::Relaxed) {
        if forks && dice.below(FORK_EVERY) == 0 {
            blocks.fork(&mut dice);
        }
        match dice.below(10) {
            0..5 => blocks.step(&mut dice),
            5..7 => tables.page_step(&mut dice),
            7..9 => keys.step(&mut dice),
            _ => temporary(manager, &mut dice),
        }
        steps.fetch_add(1, Ordering::Relaxed);
    }
    blocks.check_all();
    keys.check_all();
}

/// Temporary memory, more than may be had of it at once; it may be refused.
fn temporary(manager: &Arc<MemoryManager>, dice: &mut Dice) {
    let most = manager.limit().0 * 3 / 2;
    let len = 4096 * (1 + dice.below(most / THREADS as u64 / 4096));
    let Ok(memory) = manager.allocate_temporary(ByteCount(len)) else { return };
    blocks::fill_and_check(memory.as_ptr(), len as usize / 8, dice);
}

/// Bytes that the process has in memory, as the kernel counts them.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("/proc is mounted");
    let line = text.lines().find(|line| line.starts_with("Rss:")).expect("a total");
    let kib = line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
    kib.expect("a number of KiB") << 10
}

/// Has the kernel move pages together, over and over, where that is permitted.
fn compact(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) && is_root() {
        let _unavailable = std::fs::write("/proc/sys/vm/compact_memory", "1");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Stops this process and lets it go on, again and again, for as long as it works.
struct Stopper(Child);

impl Stopper {
    fn start() -> Stopper {
        const SCRIPT: &str = "n=$1; while [ $n -gt 0 ]; do n=$((n - 1)); sleep 0.4; \
            kill -STOP $0 || exit; sleep 0.1; kill -CONT $0; done";
        let times = (time().as_millis() / 500).to_string();
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, &std::process::id().to_string(), &times]);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        Stopper(command.spawn().expect("sh starts"))
    }
}

impl Drop for Stopper {
    fn drop(&mut self) {
        // Not killed: it may just have stopped this process, which then would stay so.
        self.0.wait().expect("a child of this process");
    }
}
