//! What the integration tests share: seeds, a watchdog, regions that may not be permitted.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod child;
pub(crate) mod faulty;
pub(crate) mod group;
pub(crate) mod hooked;
pub(crate) mod numbered;
pub(crate) mod place;
pub(crate) mod power;
pub(crate) mod refuse;
pub(crate) mod visits;

use farheap::config::Builder;
use farheap::manager::ConsumerStats;
use farheap::region::{Install, Region, RegionConfig};
use farheap::store::{IoEngine, MemStore, Store};
use farheap::{ByteCount, Error, Heap, MemoryManager};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Returns the statistics of the first consumer of this name.
pub(crate) fn consumer(manager: &MemoryManager, name: &str) -> Option<ConsumerStats> {
    let found = manager.consumers().into_iter().find(|(of, _)| &**of == name);
    found.map(|(_, stats)| stats)
}

/// A small fast generator of test decisions (splitmix64), so that a printed seed repeats a run.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }
}

/// The seed of this run: `FARHEAP_TEST_SEED`, else from the clock; printed, so that it repeats.
pub(crate) fn seed(test: &str) -> u64 {
    let seed = std::env::var("FARHEAP_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("the clock is past 1970").as_nanos() as u64
    });
    println!("{test}: FARHEAP_TEST_SEED={seed}");
    seed
}

/// The bytes at a place, for what takes ranges.
pub(crate) fn bytes(ptr: *const u8, len: ByteCount) -> *const [u8] {
    std::ptr::slice_from_raw_parts(ptr, len.as_usize())
}

/// Whether tests do all of their work: `FARHEAP_TEST_LONG` is set, as `.ci/run` does for one of its runs.
pub(crate) fn is_long() -> bool {
    std::env::var_os("FARHEAP_TEST_LONG").is_some()
}

/// How much of work at random a test does: `all` of it, or a quarter where nobody asks for a long run.
pub(crate) fn amount(all: usize) -> usize {
    if is_long() { all } else { all.div_ceil(4) }
}

/// What is to happen has happened after so long, on a machine with thirty runnable processes too:
/// tests that gave it 30 s or 120 s failed there.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// Ends the process when a test hangs: a hang is a failure, not a wait. Less than [`PATIENCE`] is
/// not a hang.
pub(crate) struct Watchdog(Option<std::sync::mpsc::Sender<()>>);

pub(crate) fn watchdog(test: &'static str, limit: Duration) -> Watchdog {
    let limit = limit.max(PATIENCE);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        if receiver.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{test} hung for {limit:?}");
            std::process::abort();
        }
    });
    Watchdog(Some(sender))
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// Tells threads that run until they are told to stop, also when what they run beside panics: a scope waits for
/// them, so that the panic was a hang.
pub(crate) struct StopOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A store in memory.
pub(crate) fn mem_store(capacity: ByteCount) -> Arc<dyn Store> {
    Arc::new(MemStore::new(capacity).expect("memory for a store"))
}

/// A region, or `None` with the reason printed where userfaultfd is not permitted.
pub(crate) fn region(config: RegionConfig, store: Arc<dyn Store>) -> Option<Region> {
    where_permitted("region", Region::create(config, store))
}

/// What was made, or `None` with the reason printed where userfaultfd is not permitted.
pub(crate) fn where_permitted<T>(what: &str, made: farheap::Result<T>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("{what}: {error}"),
    }
}

/// The heap that a configuration text describes, or `None` with the reason printed where
/// userfaultfd is not permitted.
pub(crate) fn heap(conf: &str) -> Option<Heap> {
    where_permitted(conf, config(conf).start())
}

/// The same, under a memory manager.
pub(crate) fn heap_under(manager: &Arc<MemoryManager>, conf: &str) -> Option<Heap> {
    where_permitted(conf, config(conf).manager(manager).start())
}

/// The options of a text, in which `install:copy` and `io:sync` force the ways of other
/// kernels.
pub(crate) fn config(conf: &str) -> Builder {
    let (mut install, mut io) = (Install::Auto, IoEngine::Auto);
    let is_option = |entry: &&str| match *entry {
        "install:copy" => {
            install = Install::Copy;
            false
        }
        "io:sync" => {
            io = IoEngine::Sync;
            false
        }
        _ => true,
    };
    let options = conf.split(',').filter(is_option).collect::<Vec<_>>().join(",");
    let builder = Heap::builder().parse(&options).unwrap_or_else(|error| panic!("{conf}: {error}"));
    builder.force(install, io)
}

/// Looks until `done`, for [`PATIENCE`] at most; returns whether it was.
pub(crate) fn eventually(mut done: impl FnMut() -> bool) -> bool {
    let started = std::time::Instant::now();
    while started.elapsed() < PATIENCE {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// What a panic that a test injects carries.
#[derive(Debug)]
pub(crate) struct Injected;

/// Panics without a word: the panic hook is not called, whose back traces would hide what failed.
pub(crate) fn inject_panic() -> ! {
    std::panic::resume_unwind(Box::new(Injected))
}

/// Whether the process is root.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self")
        .is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}
