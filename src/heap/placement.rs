//! What is asked for, and where a thread's allocations go: its scope's placement, unless the thread is pinned local.
//!
//! Kept in constant thread-local cells without a destructor, so that it works inside allocators,
//! before `main` and while a thread exits. Used by everything of the heap.
//!
//! # Invariants
//! 1. A pinned thread's allocations are local whatever scope or size says. Our own threads are
//!    pinned for life, every thread is inside a hook.

use crate::base::local::{Pins, set_pins};
use std::cell::Cell;
use std::marker::PhantomData;

/// Where memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// RAM that is never evicted.
    Local,
    /// The far tier: pages that can live on its store.
    Far,
}

/// Whether new memory must be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Contents do not matter.
    Any,
    /// All bytes are zero.
    Zero,
}

/// A thread's state; see the module's documentation.
struct Thread {
    /// The innermost scope's placement.
    scope: Cell<Option<Placement>>,
    /// How many pins are in force.
    pins: Cell<u32>,
    /// What the two say together; kept because every allocation asks.
    placement: Cell<Option<Placement>>,
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

thread_local! {
    static THREAD: Thread = const {
        Thread { scope: Cell::new(None), pins: Cell::new(0), placement: Cell::new(None) }
    };
}

/// Changes the calling thread's scope; returns the one before.
pub(super) fn set_scope(scope: Option<Placement>) -> Option<Placement> {
    THREAD.with(|thread| thread.set_scope(scope))
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

/// Keeps this thread's allocations local for ever: for handlers, evictors and all other threads that
/// would wait for themselves if their own memory were evicted.
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
