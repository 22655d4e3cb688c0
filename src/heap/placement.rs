//! Requested placement of a thread's allocations: its scope's placement, unless the thread is pinned local.
//!
//! Kept in constant thread-local cells without a destructor, so that it works inside allocators,
//! before `main` and while a thread exits. Used by everything of the heap.
//!
//! # Invariants
//! 1. A pinned thread's allocations are local whatever scope or size says. Our own threads are
//!    pinned for life, every thread is inside a hook.

use super::jemalloc::SMALL_MAX;
use crate::base::local::{PinHooks, set_pins};
use crate::base::strict_assert;
use crate::base::sync::{AtomicU32, Ordering::Relaxed};
use std::cell::Cell;
use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;

/// A tier of memory, local or far, and a handle that allocates from it: `Vec<T, Tier>`.
///
/// A small value to be copied: [`LOCAL`](Tier::LOCAL), [`FAR`](Tier::FAR), or from
/// [`Heap::tier`](crate::Heap::tier) of a tier that was added. That names its tier for ever: once
/// it is shut down, allocations through it fail with `AllocError`, also if another tier has
/// been started since. In a forked child what is asked for far is local, or fails where it cannot have its parent's
/// far memory.
///
/// Its allocations go back to this tier, freed by any thread and through any handle: the
/// address tells. As with [`Far`](crate::Far), a system call may touch far ones only where the kernel's own
/// faults are served.
///
/// # Examples
/// ```
/// use farheap::allocator_api2::vec::Vec;
/// use farheap::{Heap, Scope, Tier};
///
/// let heap = match Heap::builder().parse("far_limit:16MiB,capacity:64MiB")?.start() {
///     Ok(heap) => heap,
///     Err(error) => {
///         println!("{error}"); // Says how to allow userfaultfd.
///         return Ok(());
///     }
/// };
/// // One string per tier: its device and limit.
/// let cold = heap.add_tier("cold", Heap::builder().parse("far_limit:8MiB,capacity:64MiB")?)?;
///
/// let mut column: Vec<u64, Tier> = Vec::new_in(cold.tier());
/// column.extend(0..2 << 20); // 16 MiB, twice the tier's limit.
/// assert_eq!(Tier::of(column.as_ptr()), Some(cold.tier()));
/// assert!(cold.stats().resident_bytes_max.get() <= 8 << 20);
/// assert_eq!(heap.stats().faults_zero, 0, "the default tier was not touched");
/// drop(column);
///
/// let row = {
///     let _cold = Scope::enter(cold.tier());
///     allocator_api2::boxed::Box::new_in([1_u8; 100], Tier::FAR)
/// };
/// assert_eq!(Tier::of(&*row), Some(heap.tier()), "a handle is stronger than a scope");
/// drop(row);
/// heap.shutdown()?; // Ends all tiers.
/// # Ok::<(), farheap::Error>(())
/// ```
// 1: local | 2: the default tier | 30: one | 29..3: how many had been added before it | 2..0: slot. Never 0, so
// that an optional one is compared in one instruction: allocations do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tier(NonZeroU32);

/// Maximum number of far tiers that run at the same time.
pub(crate) const TIERS_MAX: usize = 8;

impl Tier {
    /// RAM that is never evicted.
    pub const LOCAL: Tier = Tier(NonZeroU32::new(1).expect("not zero"));

    /// The default far tier, whichever heap runs: pages that can live on its store.
    pub const FAR: Tier = Tier(NonZeroU32::new(2).expect("not zero"));

    /// Of added tiers only.
    const BIT: u32 = 1 << 30;

    /// A name for the tier in this slot. Slot 0 is the default one's; no two others have the same.
    pub(super) fn new(slot: usize) -> Tier {
        static ADDED: AtomicU32 = AtomicU32::new(0);
        assert!(slot < TIERS_MAX, "there is no slot {slot}");
        if slot == 0 {
            return Tier::FAR;
        }
        let number = ADDED.fetch_add(1, Relaxed);
        assert!(number < 1 << 27, "there were {number} tiers");
        Tier(NonZeroU32::new(Tier::BIT | number << 3 | slot as u32).expect("a bit is set"))
    }

    /// The tier as a number, for C.
    #[doc(hidden)]
    #[must_use]
    pub const fn to_bits(self) -> u32 {
        self.0.get()
    }

    /// The tier that a number names; there need not be one, then nothing can be allocated from it.
    #[doc(hidden)]
    #[must_use]
    pub fn from_bits(bits: u32) -> Option<Tier> {
        let tier = Tier(NonZeroU32::new(bits)?);
        (matches!(tier, Tier::LOCAL | Tier::FAR) || bits ^ Tier::BIT < Tier::BIT).then_some(tier)
    }

    /// True if it is the default tier's, or made to become it.
    pub(crate) fn is_default(self) -> bool {
        self == Tier::FAR
    }

    /// Its place among the tiers that run: another one may have had it, or will.
    #[inline]
    pub(crate) fn slot(self) -> usize {
        strict_assert!(self != Tier::LOCAL, "local memory has no slot");
        if self.is_default() { 0 } else { (self.0.get() & 7) as usize }
    }
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Tier::LOCAL => f.write_str("Local"),
            Tier::FAR => f.write_str("Far"),
            Tier(bits) => write!(f, "Tier({})", (bits.get() ^ Tier::BIT) >> 3),
        }
    }
}

/// Content that new memory must have: zeros, or any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Contents do not matter.
    Any,
    /// All bytes are zero.
    Zero,
}

/// Smaller blocks are small blocks: jemalloc's own caches keep it.
pub(super) const SMALL_END: usize = SMALL_MAX + 1;

/// A thread's state; see the module's documentation.
struct ThreadScopes {
    /// The innermost scope's placement, and its number.
    scope: Cell<Option<Tier>>,
    innermost: Cell<u64>,
    /// The number of the scope that was begun last, each has one more than the one before; 0 before the first.
    begun: Cell<u64>,
    /// How many pins are in force.
    pins: Cell<u32>,
    /// Result of the two; kept because allocations ask.
    placement: Cell<Option<Tier>>,
    /// Small blocks below this size are local, as far as the two have a say; kept because every allocation asks.
    small_below: Cell<usize>,
}

impl ThreadScopes {
    fn set_scope(&self, scope: Option<Tier>, number: u64) {
        self.scope.set(scope);
        self.innermost.set(number);
        self.set_pins(self.pins.get());
    }

    fn set_pins(&self, pins: u32) {
        self.pins.set(pins);
        let placement = if pins > 0 { Some(Tier::LOCAL) } else { self.scope.get() };
        self.placement.set(placement);
        let may_be_local = matches!(placement, None | Some(Tier::LOCAL));
        self.small_below.set(if may_be_local { SMALL_END } else { 0 });
    }
}

thread_local! {
    static THREAD: ThreadScopes = const {
        ThreadScopes {
            scope: Cell::new(None),
            innermost: Cell::new(0),
            begun: Cell::new(0),
            pins: Cell::new(0),
            placement: Cell::new(None),
            small_below: Cell::new(SMALL_END),
        }
    };
}

/// A scope of the calling thread that was begun, with what is in force again when it ends.
#[derive(Debug)]
pub(super) struct Begun {
    number: u64,
    outer: Option<Tier>,
    outer_number: u64,
}

/// Begins a scope inside of those that the calling thread is in.
pub(super) fn begin_scope(placement: Tier) -> Begun {
    THREAD.with(|thread| {
        let number = thread.begun.get() + 1;
        thread.begun.set(number);
        let begun =
            Begun { number, outer: thread.scope.get(), outer_number: thread.innermost.get() };
        thread.set_scope(Some(placement), number);
        begun
    })
}

/// Ends a scope of the calling thread. Returns whether it was the innermost one, or has ended: else all scopes of
/// the thread end, because which of them are to be left in force is not known.
pub(super) fn end_scope(scope: &Begun) -> bool {
    THREAD.with(|thread| {
        let innermost = thread.innermost.get();
        match innermost.cmp(&scope.number) {
            Ordering::Equal => thread.set_scope(scope.outer, scope.outer_number),
            Ordering::Greater => thread.set_scope(None, 0),
            Ordering::Less => {}
        }
        innermost <= scope.number
    })
}

/// The placement in force on this thread, if a scope or a pin decides it.
#[inline]
pub(super) fn placement() -> Option<Tier> {
    let mut placement = None;
    // Not as the closure's value: of that the compiler asks whether it is the error of a value that has been
    // destroyed, which there is none of here.
    THREAD.with(|thread| placement = thread.placement.get());
    placement
}

/// The size below which a small block is local on this thread, unless the default tier's threshold sends it far.
#[inline]
pub(super) fn small_below() -> usize {
    THREAD.with(|thread| thread.small_below.get())
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
    set_pins(PinHooks { pin: pin_thread_local, unpin });
}

/// Keeps this thread's allocations local for ever: for handlers, evictors and all other threads that
/// would wait for themselves if their own memory were evicted.
pub(crate) fn pin_thread_local() {
    std::mem::forget(pin());
}

/// True if what the policy sends far, and far memory refuses, is to be local: on a thread that panics.
///
/// Else the panic could not be reported: a backtrace takes blocks of hundreds of KiB, which are far
/// by their size, and in a far scope so is each of its strings; an allocation that fails during a
/// panic ends the process.
pub(super) fn reports_failure() -> bool {
    std::thread::panicking()
}
