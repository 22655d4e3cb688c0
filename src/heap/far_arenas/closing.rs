//! The end of a far tier: it is closed once nothing of it is allocated and nobody is inside.

#![expect(unsafe_code, reason = "takes caches from their owners, and destroys arenas")]

use super::FarArenas;
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::heap::entry::Entrance;
use crate::heap::placement;
use crate::heap::thread_cache::{Revoked, Revoker, ThreadCache, ThreadCaches};
use crate::sys::membarrier;
use std::time::Duration;

/// How often [`FarArenas::close`] looks whether all threads have left, and the pause in between:
/// about five seconds in all.
const LEAVE_ROUNDS_MAX: u32 = 5_000;
const LEAVE_PAUSE: Duration = Duration::from_millis(1);

/// Without `membarrier`: longer than any processor keeps a store to itself.
const STORES_SETTLE: Duration = Duration::from_millis(10);

impl FarArenas {
    /// Closes the tier: nobody allocates from it any more, unless what is returned is dropped.
    ///
    /// # Errors
    /// [`Error::InUse`] when allocations exist, or a thread does not leave for five seconds; the
    /// tier then goes on as before.
    pub(crate) fn close(&self) -> Result<ClosedArenas<'_>> {
        let mut control = None;
        let _ = wait(|| {
            control = self.caches.take_control();
            control.is_some()
        });
        let Some(control) = control else {
            return Err(Error::InUse { bytes: self.allocated() });
        };
        // From here on dropped, also on the way out.
        let mut closed = ClosedArenas { arenas: self, caches: Vec::new(), _control: control };
        self.entry.set_closed(true);
        let alone = wait_until_alone(&self.caches, &self.entry);
        let bytes = self.allocated();
        let (Some(caches), ByteCount::ZERO) = (alone, bytes) else {
            return Err(Error::InUse { bytes });
        };
        closed.caches = caches;
        Ok(closed)
    }
}

/// Revokes all caches and waits until no thread is inside the tier; returns what is inside the
/// caches then. `None`: a thread does not leave.
fn wait_until_alone(caches: &ThreadCaches, entry: &Entrance) -> Option<Vec<Revoked<'static>>> {
    // A thread that claims a cache is counted in the shared path: once that is empty, `caches` is
    // complete.
    if !wait(|| entry.is_empty()) {
        return None;
    }
    caches.iter().for_each(ThreadCache::revoke);
    settle();
    let _pinned = placement::pin();
    let mut revoked = Vec::with_capacity(caches.iter().count());
    for cache in caches.iter() {
        // An owner that looks whether the cache is still revoked seems to be inside, but not to who
        // has found the cache empty before: each is asked until then and no further.
        let is_empty = wait(|| {
            // SAFETY: revoked, with a barrier since, and not asked again once it is empty; the
            // cache is restored after `close` has dropped these.
            let access = unsafe { cache.access_revoked() };
            let is_empty = access.is_some();
            revoked.extend(access);
            is_empty
        });
        if !is_empty {
            return None;
        }
    }
    wait(|| entry.is_empty()).then_some(revoked)
}

/// A closed tier, with nothing of it allocated, that nobody is inside of. Open again when this is dropped.
pub(crate) struct ClosedArenas<'a> {
    arenas: &'a FarArenas,
    caches: Vec<Revoked<'static>>,
    _control: Revoker<'a>,
}

impl ClosedArenas<'_> {
    /// Ends the tier: destroys its arenas, so that the source gets all its ranges back.
    ///
    /// # Errors
    /// [`Error::Jemalloc`] when jemalloc keeps an arena.
    pub(crate) fn end(mut self) -> Result<()> {
        let caches = std::mem::take(&mut self.caches);
        let arenas = self.arenas;
        std::mem::forget(self); // Never open again; nobody has to have the control any more.
        // SAFETY: the tier stays closed from here on, and nobody restores the caches of a closed one.
        caches.into_iter().for_each(|cache| unsafe { cache.close() });
        // SAFETY: nothing is allocated, no thread is inside or can enter, and no cache is left.
        unsafe { arenas.arenas.destroy() }?;
        arenas.sizes.end();
        let source = arenas.source.lock().take();
        drop(source);
        Ok(())
    }
}

impl Drop for ClosedArenas<'_> {
    fn drop(&mut self) {
        self.caches.clear();
        self.arenas.entry.set_closed(false);
        self.arenas.caches.iter().for_each(ThreadCache::restore);
    }
}

/// Waits until `done`, for a bounded time; returns whether it was.
fn wait(mut done: impl FnMut() -> bool) -> bool {
    for _ in 0..LEAVE_ROUNDS_MAX {
        if done() {
            return true;
        }
        // Threads that leave have no one to tell: their path has no room for it.
        std::thread::sleep(LEAVE_PAUSE);
    }
    false
}

/// Makes the revocations so far visible to all threads, and their `busy` to this one.
fn settle() {
    if !membarrier::on_all_threads() {
        // There is no other way to wait for another processor's stores.
        std::thread::sleep(STORES_SETTLE);
    }
}
