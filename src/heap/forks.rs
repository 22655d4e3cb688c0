//! Forks of a process that has jemalloc's metadata in far memory.
//!
//! jemalloc takes all its locks around a fork (`pthread_atfork(3)`), while nobody serves faults. Where
//! a thread holds such a lock and waits for a page of far metadata, the fork would wait for ever. So first
//! all threads leave the arenas of tiers with far metadata, and jemalloc's controls; those that come
//! later wait until the process has forked. The memory that the locks are in stays resident meanwhile
//! ([`ExtentSource::keep_at_forks`](super::hooks::ExtentSource::keep_at_forks)).
//!
//! ```text
//!  before: PAUSE of tiers -> their caches revoked, nobody inside -> PAUSE of controls, nobody inside
//!          the region's threads stand still (paging::fork); jemalloc takes its locks
//!  fork
//!  after:  jemalloc gives them back, in the child it resets them; the regions go on; both pauses end
//! ```
//! Uses `entry`, `tiers`; the runtime registers it.
//!
//! # Invariants
//! 1. Tiers pause before controls: a thread inside a tier may need a control.
//! 2. One thread forks at a time: it holds [`FORKING`] from `before` to `after`.

#![expect(unsafe_code, reason = "passes what is under way from one function of a fork to the next")]

use super::entry::{CONTROLS, CONTROLS_PAUSE, TIERS_PAUSE};
use super::far_arenas::ClosedArenas;
use super::{placement, tiers};
use crate::base::sync::{AtomicPtr, Ordering::Relaxed};
use crate::sys::fork;
use std::ptr;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// How often a fork looks whether threads have left. They wait for a device at most.
const LEAVE_PAUSE: Duration = Duration::from_millis(1);

/// A fork that has begun.
struct UnderWay {
    tiers: Vec<ClosedArenas<'static>>,
    _alone: MutexGuard<'static, ()>,
}

static FORKING: Mutex<()> = Mutex::new(());
/// Null unless a fork is under way that threads have to make way for.
static UNDER_WAY: AtomicPtr<UnderWay> = AtomicPtr::new(ptr::null_mut());

/// From now on forks are noticed.
pub(crate) fn watch_forks() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| fork::around_forks(before, after, after));
}

extern "C" fn before() {
    let _pinned = placement::pin();
    // Before the lock is taken: a thread that let it go again before it forks could hold it while another
    // thread forks, and no fork of that child's would ever get it.
    if !tiers::have_far_metadata() {
        return;
    }
    let alone = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    TIERS_PAUSE.begin();
    let tiers = tiers::stand_still(|| std::thread::sleep(LEAVE_PAUSE));
    CONTROLS_PAUSE.begin();
    while !CONTROLS.is_empty() {
        std::thread::sleep(LEAVE_PAUSE);
    }
    UNDER_WAY.store(Box::into_raw(Box::new(UnderWay { tiers, _alone: alone })), Relaxed);
}

/// In either process.
extern "C" fn after() {
    let under_way = UNDER_WAY.swap(ptr::null_mut(), Relaxed);
    if under_way.is_null() {
        return;
    }
    let _pinned = placement::pin();
    CONTROLS_PAUSE.end();
    TIERS_PAUSE.end();
    // SAFETY: made by `before` of this thread's fork, and taken once in each process.
    let UnderWay { tiers, _alone } = *unsafe { Box::from_raw(under_way) };
    drop(tiers);
}
