//! The maintenance thread: gives freed memory back, and counts local memory.
//!
//! There is one for each tier. Every [`LOOK_EVERY`] it maintains the tier and has caches follow the limit; when
//! the region calls, because it is short of memory, it purges far and local arenas at once. That of the
//! default tier looks after what is not far too: under a memory manager it counts what jemalloc holds for
//! local memory to an account (`book/src/design/memory.md`, local memory), and under a limit on the process
//! it has far memory give way ([`process_limit`](super::process_limit)). Each writes what its tier does for other processes to
//! see ([`live`](super::live)). Uses `heap` and `region`.
//!
//! # Invariants
//! 1. It touches no far memory but jemalloc's metadata, where that is far, and nobody who serves a fault
//!    waits for it.

use super::live::Live;
use super::process_limit::ProcessLimit;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, Ordering};
use crate::base::units::ByteCount;
use crate::heap::{self, FarArenas};
use crate::limit::manager::{Account, MemoryManager, Reclaim, ReclaimCost};
use crate::paging::region::{REST, Region};
use crate::sys::messages;
use crate::sys::signals::SignalsBlocked;
use crate::sys::thread;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often freed memory is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Under a manager, what threads keep of large local blocks is at most 1/LOCAL_SHARE of the limit.
const LOCAL_SHARE: u64 = 8;

/// Free memory that is not worth a purge, which takes the locks of all arenas in turn.
const PURGE_MIN: ByteCount = ByteCount::mib(1);

/// Local memory under a manager: it is counted, and what is free of it comes back.
#[derive(Debug)]
pub(super) struct LocalMemory {
    account: Account,
    region: Arc<Region>,
}

impl LocalMemory {
    /// Opens its account.
    ///
    /// # Errors
    /// [`Error::TooManyConsumers`](crate::Error::TooManyConsumers).
    pub(super) fn join(manager: &MemoryManager, region: &Arc<Region>) -> Result<Arc<LocalMemory>> {
        let account = manager.join("local memory")?;
        let local = Arc::new(LocalMemory { account, region: Arc::clone(region) });
        let reclaimer: Weak<LocalMemory> = Arc::downgrade(&local);
        local.account.set_reclaimer(reclaimer);
        Ok(local)
    }

    /// Counts what jemalloc holds.
    fn count(&self) {
        self.account.set_used(heap::local_resident());
    }
}

impl Reclaim for LocalMemory {
    fn reclaim(&self, _want: ByteCount, cost: ReclaimCost) -> ByteCount {
        if cost != ReclaimCost::Free {
            return ByteCount::ZERO; // What is in use stays.
        }
        let before = self.account.used();
        self.region.purge().call_and_wait();
        ByteCount(before.0.saturating_sub(self.account.used().0))
    }

    fn describe_held(&self) -> String {
        " (cannot be evicted)".to_owned()
    }
}

/// Duties of the default tier's thread towards memory that is not far.
#[derive(Clone, Debug)]
pub(super) enum Beside {
    /// It is outside of the limit.
    Nothing,
    /// It is counted to an account of a memory manager.
    Counted(Arc<LocalMemory>),
    /// Far memory gives way to it.
    Bounded(Arc<ProcessLimit>),
}

impl Beside {
    /// Looks at what there is; returns when to look again.
    fn look(&self, region: &Region) -> Duration {
        match self {
            Beside::Nothing => {}
            Beside::Counted(local) => local.count(),
            Beside::Bounded(limit) => return limit.follow(region),
        }
        LOOK_EVERY
    }

    pub(super) fn process_limit(&self) -> Option<&Arc<ProcessLimit>> {
        match self {
            Beside::Bounded(limit) => Some(limit),
            _ => None,
        }
    }

    /// Bytes of large local blocks that threads may keep where far memory has this limit.
    fn local_cache_max(&self, limit: ByteCount) -> ByteCount {
        match self {
            // Local memory is outside of the limit of a heap that stands alone.
            Beside::Nothing => ByteCount(u64::MAX),
            _ => ByteCount(limit.0 / LOCAL_SHARE),
        }
    }
}

/// The thread. Ends when dropped.
#[derive(Debug)]
pub(super) struct Maintenance {
    region: Arc<Region>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Maintenance {
    /// Starts the thread; it has begun, and allocates locally, when this returns.
    pub(super) fn start(
        arenas: &'static FarArenas,
        region: &Arc<Region>,
        beside: Beside,
        name: &str,
    ) -> Result<Maintenance> {
        // Where the tier serves already, the thread's handle, which the evictor unparks it by, would
        // be far in a far scope, or where everything is.
        let _ours = keep_local();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, cared) = (Arc::clone(&stop), Arc::clone(region));
        let (begun, has_begun) = std::sync::mpsc::channel();
        let live = Live::new(name);
        let run = move || {
            heap::pin_thread_local();
            begun.send(()).expect("the starting thread waits");
            drop(begun);
            cared.as_bystander(|| run(arenas, &cared, &beside, live, &stopped));
        };
        let _blocked = SignalsBlocked::new();
        let thread = thread::spawn("farheap-maintain", run)?;
        has_begun.recv().expect("the thread says that it has begun before it ends");
        region.purge().set_thread(Some(thread.thread().clone()));
        Ok(Maintenance { region: Arc::clone(region), stop, thread: Some(thread) })
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        if !self.region.is_here() {
            std::mem::forget(self.thread.take()); // The parent's.
            return;
        }
        self.region.purge().set_thread(None);
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of it has been reported by the hook.
            drop(thread.join());
        }
    }
}

fn run(
    arenas: &FarArenas,
    region: &Region,
    beside: &Beside,
    mut live: Option<Live>,
    stop: &AtomicBool,
) {
    SignalsBlocked::for_good();
    let follow_limit = || {
        arenas.follow_limit(region.limit(), heap::tier_count());
        if arenas.tier().is_default() {
            heap::set_local_cache_max(beside.local_cache_max(region.limit()));
        }
    };
    let mut look_again = beside.look(region);
    follow_limit();
    let (mut maintained, mut is_ending) = (Instant::now(), false);
    while !stop.load(Ordering::Acquire) {
        let calls = if region.purge().is_called() { REST } else { LOOK_EVERY };
        std::thread::park_timeout(look_again.min(calls));
        look_again = beside.look(region);
        if region.purge().is_due() {
            arenas.give_back(PURGE_MIN);
            heap::give_local_back(PURGE_MIN);
            beside.look(region);
            region.purge().answer();
        }
        if maintained.elapsed() >= LOOK_EVERY {
            follow_limit();
            arenas.maintain();
            if arenas.tier().is_default() {
                heap::maintain_local();
                heap::release_for_ended_threads();
                is_ending = is_ending || thread::is_left_alone() && thread::end_process();
            }
            beside.look(region);
            messages::look_for_logger();
            if let Some(live) = &mut live {
                let limit = beside.process_limit().map(|limit| limit.limit());
                live.write(region, arenas, limit);
            }
            maintained = Instant::now();
        }
    }
}
