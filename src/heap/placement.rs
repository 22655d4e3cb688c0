//! What a thread knows about the heap: its placement, whether it is pinned local, its cache.
//!
//! All of it lives in constant thread-local cells without a destructor, so that it works inside
//! allocators, before `main` and while a thread exits. A second thread-local value has the
//! destructor: it gives the thread's [`ThreadCache`] back. Uses `thread_cache`; used by everything above.
//!
//! # Invariants
//! 1. A pinned thread's allocations are local whatever scope or size says. Our own threads are
//!    pinned for life, every thread is inside a hook.
//! 2. A thread that has given its cache back takes no other; what still allocates then (later
//!    destructors) takes the shared path.

use super::far_arenas::FarArenas;
use super::source::Edges;
use super::thread_cache::{Access, ThreadCache};
use crate::base::local::{Pins, set_pins};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr;

/// Where memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// RAM that is never evicted.
    Local,
    /// The far tier: pages that can live on its store.
    Far,
}

/// A thread's state; see the module's documentation.
struct Thread {
    /// The innermost scope's placement.
    scope: Cell<Option<Placement>>,
    /// How many pins are in force.
    pins: Cell<u32>,
    /// What the two say together; kept because every allocation asks.
    placement: Cell<Option<Placement>>,
    /// See [`set_refused`].
    refused: Cell<bool>,
    /// See [`take_commit_refused`].
    commit_refused: Cell<bool>,
    /// See [`take_committed`].
    committed: Cell<Committed>,
    /// The tier that `thread_cache` belongs to; a tier is never freed, so the address names it.
    arenas: Cell<*const FarArenas>,
    cache: Cell<Option<&'static ThreadCache>>,
    life: Cell<Life>,
}

impl Thread {
    /// Changes the scope; returns the one before.
    fn set_scope(&self, scope: Option<Placement>) -> Option<Placement> {
        let outer = self.scope.replace(scope);
        self.set_pins(self.pins.get());
        outer
    }

    fn set_pins(&self, pins: u32) {
        self.pins.set(pins);
        let placement = if pins > 0 { Some(Placement::Local) } else { self.scope.get() };
        self.placement.set(placement);
    }
}

/// A range that a source has committed: it reads as zero, but for its edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Committed {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) edges: Edges,
}

impl Committed {
    const NOTHING: Committed = Committed { start: 0, len: 0, edges: Edges { head: 0, tail: 0 } };

    /// The parts of `[start, start + len)` that may hold old bytes: address and length, empty ones
    /// too. `None`: not all of it was committed.
    pub(super) fn old_parts(self, start: usize, len: usize) -> Option<[(usize, usize); 2]> {
        let (end, all_end) = (start + len, self.start + self.len);
        if start < self.start || end > all_end {
            return None;
        }
        let head_end = (self.start + self.edges.head).clamp(start, end);
        let tail_start = (all_end - self.edges.tail).clamp(head_end, end);
        Some([(start, head_end - start), (tail_start, end - tail_start)])
    }
}

/// How far the thread is with its cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// No destructor is registered yet.
    Fresh,
    /// The destructor is being registered, which may allocate.
    Registering,
    /// May have a cache.
    Running,
    /// The destructor has run.
    Exiting,
}

/// Gives the cache back when the thread exits.
struct ExitGuard;

thread_local! {
    static THREAD: Thread = const {
        Thread {
            scope: Cell::new(None),
            pins: Cell::new(0),
            placement: Cell::new(None),
            refused: Cell::new(false),
            commit_refused: Cell::new(false),
            committed: Cell::new(Committed::NOTHING),
            arenas: Cell::new(ptr::null()),
            cache: Cell::new(None),
            life: Cell::new(Life::Fresh),
        }
    };
    static EXIT: ExitGuard = const { ExitGuard };
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        THREAD.with(|thread| {
            thread.life.set(Life::Exiting);
            if let Some(cache) = thread.cache.take() {
                cache.give_back();
            }
        });
    }
}

/// Sends this thread's allocations to one tier while it lives; see [`scope`].
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct Scope {
    outer: Option<Placement>,
    /// Scopes belong to their thread.
    not_send: PhantomData<*const ()>,
}

/// Sends the allocations that this thread makes through [`FarHeap`](crate::FarHeap) to
/// `placement` until the returned guard is dropped. Scopes nest; guards are to be dropped in
/// reverse order.
///
/// A scope is stronger than the size threshold and weaker than the handles [`Far`](crate::Far)
/// and [`Local`](crate::Local). It also catches what a library allocates on first use, such as
/// the buffer of the standard output. While no far heap is running, everything is local.
///
/// It also catches the buffers of `std::fs::read` and its like: where the kernel's own faults are
/// not served they fail with `EFAULT` as the handle [`Far`](crate::Far) explains, so leave them out
/// of a far scope there, or in a local scope within it.
///
/// # Examples
/// ```
/// use farheap::{Placement, scope};
/// let cold = {
///     let _scope = scope(Placement::Far);
///     vec![0_u64; 1024]
/// };
/// assert_eq!(cold.len(), 1024);
/// ```
pub fn scope(placement: Placement) -> Scope {
    // Not inside an allocator: the best moment to register the destructor. Compilers before
    // 1.93 abort when an allocator registers one while the list of them grows.
    register_exit();
    Scope { outer: THREAD.with(|thread| thread.set_scope(Some(placement))), not_send: PhantomData }
}

impl Scope {
    /// Leaves the scope in force until the thread ends.
    ///
    /// A scope concerns its own thread only: what it hands to other threads is allocated by their
    /// rules. This gives the threads of a pool one each, where they start.
    ///
    /// # Examples
    /// ```
    /// use farheap::{Placement, scope};
    /// use rayon::prelude::*;
    ///
    /// let pool = rayon::ThreadPoolBuilder::new()
    ///     .num_threads(2)
    ///     .start_handler(|_| scope(Placement::Far).keep())
    ///     .build()
    ///     .expect("threads");
    /// // What the workers allocate is far, once a heap runs.
    /// let rows: Vec<String> = pool.install(|| (0..1000).into_par_iter().map(|n| n.to_string()).collect());
    /// assert_eq!(rows[999], "999");
    /// ```
    /// With tokio: `runtime::Builder::on_thread_start(|| scope(Placement::Far).keep())`. A guard
    /// must not live across an `.await`, after which the task may be on another thread; it is not
    /// [`Send`], so that a task which holds one cannot be spawned.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        THREAD.with(|thread| thread.set_scope(self.outer));
    }
}

/// The placement in force on this thread, if a scope or a pin decides it.
#[inline]
pub(super) fn placement() -> Option<Placement> {
    THREAD.with(|thread| thread.placement.get())
}

/// Keeps a thread's allocations local while it lives.
pub(crate) struct Pin(PhantomData<*const ()>);

/// Keeps this thread's allocations local until the guard is dropped.
pub(crate) fn pin() -> Pin {
    THREAD.with(|thread| thread.set_pins(thread.pins.get() + 1));
    Pin(PhantomData)
}

impl Drop for Pin {
    fn drop(&mut self) {
        unpin();
    }
}

fn unpin() {
    THREAD.with(|thread| thread.set_pins(thread.pins.get() - 1));
}

/// From now on the layers below keep what they allocate for themselves local.
pub(crate) fn keep_own_allocations_local() {
    set_pins(Pins { pin: pin_thread_local, unpin });
}

/// Keeps this thread's allocations local for ever: for handlers, evictors and all other threads that would
/// wait for itself if its own memory were evicted.
pub(crate) fn pin_thread_local() {
    std::mem::forget(pin());
}

/// Whether what the policy sends far, and far memory refuses, is to be local: on a thread that panics.
///
/// Else the panic could not be reported: a backtrace takes blocks of hundreds of KiB, which are far
/// by their size, and in a far scope so is each of its strings; an allocation that fails during a
/// panic ends the process.
pub(super) fn reports_failure() -> bool {
    std::thread::panicking()
}

/// Remembers how the last attempt to give everything free back ended: whether memory was refused
/// even then.
pub(super) fn set_refused(refused: bool) {
    THREAD.with(|thread| thread.refused.set(refused));
}

/// Whether giving everything free back again is in vain: it just was, and this thread panics. A
/// backtrace in a far scope allocates thousands of times, and each attempt takes milliseconds.
pub(super) fn gives_up() -> bool {
    THREAD.with(|thread| thread.refused.get()) && reports_failure()
}

/// Remembers that a source refused to commit during the allocation under way.
pub(super) fn note_commit_refused() {
    THREAD.with(|thread| thread.commit_refused.set(true));
}

/// Whether a source has refused to commit since the last call.
pub(super) fn take_commit_refused() -> bool {
    THREAD.with(|thread| thread.commit_refused.take())
}

/// Remembers what a source has committed for the allocation under way.
pub(super) fn note_committed(committed: Committed) {
    THREAD.with(|thread| thread.committed.set(committed));
}

/// What sources have committed on this thread since the last call, the last of it if anything.
pub(super) fn take_committed() -> Option<Committed> {
    let committed = THREAD.with(|thread| thread.committed.replace(Committed::NOTHING));
    (committed != Committed::NOTHING).then_some(committed)
}

/// Opens this thread's cache of `tier`, claiming one at the first call. `None`: there is none to
/// be had, or it is closed to the owner at the moment; take the shared path.
#[inline]
pub(super) fn access(arenas: &'static FarArenas) -> Option<Access<'static>> {
    THREAD.with(|thread| {
        if ptr::eq(thread.arenas.get(), arenas)
            && let Some(cache) = thread.cache.get()
        {
            return cache.access();
        }
        attach(thread, arenas)
    })
}

/// As [`access`], of a cache that the thread has already.
#[inline]
pub(super) fn access_own(arenas: &'static FarArenas) -> Option<Access<'static>> {
    THREAD.with(|thread| {
        let cache = thread.cache.get().filter(|_| ptr::eq(thread.arenas.get(), arenas));
        cache.and_then(ThreadCache::access)
    })
}

#[cold]
fn attach(thread: &Thread, arenas: &'static FarArenas) -> Option<Access<'static>> {
    if ptr::eq(thread.arenas.get(), arenas) && thread.cache.get().is_none() {
        return None;
    }
    if !register_exit() {
        return None;
    }
    // A tier that has no cache left is remembered too: asking again costs a search.
    let cache = arenas.claim_cache().ok()?;
    thread.arenas.set(arenas);
    thread.cache.set(cache);
    cache?.access()
}

/// Makes sure that the thread's destructor runs; `false` when it has run, or on the way there.
fn register_exit() -> bool {
    THREAD.with(|thread| {
        if thread.life.get() == Life::Fresh {
            thread.life.set(Life::Registering);
            // `Err` only after the destructor has run; then it has set `Exiting`.
            if EXIT.try_with(|_| ()).is_ok() {
                thread.life.set(Life::Running);
            }
        }
        thread.life.get() == Life::Running
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_and_restore_the_outer_placement() {
        assert_eq!(placement(), None);
        let outer = scope(Placement::Far);
        assert_eq!(placement(), Some(Placement::Far));
        {
            let _inner = scope(Placement::Local);
            assert_eq!(placement(), Some(Placement::Local));
        }
        assert_eq!(placement(), Some(Placement::Far));
        drop(outer);
        assert_eq!(placement(), None);
    }

    #[test]
    fn old_parts_of_a_block_are_what_it_has_of_the_edges() {
        let edges = Edges { head: 10, tail: 20 };
        let committed = Committed { start: 1000, len: 100, edges };
        assert_eq!(committed.old_parts(1000, 100), Some([(1000, 10), (1080, 20)]));
        assert_eq!(committed.old_parts(1005, 80), Some([(1005, 5), (1080, 5)]));
        assert_eq!(committed.old_parts(1010, 70), Some([(1010, 0), (1080, 0)]));
        assert_eq!(committed.old_parts(1085, 15), Some([(1085, 0), (1085, 15)]));
        assert_eq!(committed.old_parts(990, 20), None);
        assert_eq!(committed.old_parts(1050, 51), None);
        let all = Committed { edges: Edges { head: 100, tail: 0 }, ..committed };
        assert_eq!(all.old_parts(1000, 100), Some([(1000, 100), (1100, 0)]));
        note_committed(all);
        assert_eq!((take_committed(), take_committed()), (Some(all), None));
    }

    #[test]
    fn a_pin_is_stronger_than_a_scope() {
        let _far = scope(Placement::Far);
        {
            let _pin = pin();
            let _inner = scope(Placement::Far);
            assert_eq!(placement(), Some(Placement::Local));
        }
        assert_eq!(placement(), Some(Placement::Far));
    }

    #[test]
    fn a_kept_scope_lasts_as_long_as_its_thread() {
        std::thread::spawn(|| {
            scope(Placement::Far).keep();
            drop(scope(Placement::Local));
            assert_eq!(placement(), Some(Placement::Far));
        })
        .join()
        .expect("the thread asserts nothing false");
        assert_eq!(placement(), None);
    }

    #[test]
    fn a_thread_pinned_for_life_stays_local() {
        std::thread::spawn(|| {
            pin_thread_local();
            let _far = scope(Placement::Far);
            assert_eq!(placement(), Some(Placement::Local));
        })
        .join()
        .expect("the thread asserts nothing false");
    }
}
