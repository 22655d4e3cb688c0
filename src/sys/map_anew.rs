//! Mapping parts of a region anew, and forking: not at the same time.
//!
//! Memory that is mapped anew is not inherited at first. Between the advice that the region is inherited and the fork,
//! that would leave a hole in the child, which then has no far memory at all.

use super::signals::SignalsBlocked;
use super::thread;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by a thread that maps a part of a region anew, and through each fork that inherits regions.
static MAPS_ANEW: Mutex<()> = Mutex::new(());
/// The thread that forks, while it does.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// While it lives no other thread maps a part of a region anew: at first that is not inherited, and would be missing in
/// the child.
#[expect(dead_code, reason = "held")]
pub(crate) struct NothingAnew(MutexGuard<'static, ()>);

impl NothingAnew {
    pub(crate) fn begin() -> NothingAnew {
        let held = MAPS_ANEW.lock().unwrap_or_else(PoisonError::into_inner);
        FORKING.store(thread::current(), Ordering::Relaxed);
        NothingAnew(held)
    }
}

impl Drop for NothingAnew {
    fn drop(&mut self) {
        FORKING.store(0, Ordering::Relaxed);
    }
}

/// Runs what maps a part of a region anew, not while another thread forks.
pub(crate) fn map_anew<T>(act: impl FnOnce() -> T) -> T {
    // A fork in a handler would wait for the thread that it has interrupted.
    let _blocked = SignalsBlocked::new();
    // What other libraries run before a fork may free memory.
    let forks = FORKING.load(Ordering::Relaxed) == thread::current();
    let _held = (!forks).then(|| MAPS_ANEW.lock().unwrap_or_else(PoisonError::into_inner));
    act()
}
