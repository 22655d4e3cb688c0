//! Opaque pointers: a number that the table of handles knows, or does not.
//!
//! ```text
//! 63..56 kind | 55..12 generation | 11..0 slot of the table
//! ```
//! A handle is never followed. Looking one up compares it with its slot's word, in the table of the
//! kind that is asked for: a handle that was freed, that is of another kind, or that was never one, is
//! told from a live one, and a generation is not used twice. After a fork the child's words are
//! inverted: handles of the parent are known, and refused.
//!
//! # Invariants
//! 1. A word in a kind's table whose low bits are its slot's number is a handle of that kind, and
//!    `object` of that slot is a box of its `Object`: [`FREE`], [`CLAIMED`] and inverted handles have
//!    other low bits. Only slot 0 is different: it is not used, and its `object` is null.
//! 2. Who changes a word from a handle to [`CLAIMED`] owns the object from then on.

#![expect(unsafe_code, reason = "keeps boxes as raw pointers, under their handles")]

use crate::error::{FARHEAP_E_FORKED, FARHEAP_E_HANDLE, FARHEAP_E_OUT_OF_MEMORY, Failure, Result};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Slots of a kind; all but the first may hold a handle.
const SLOTS: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 12;
const KIND_SHIFT: u32 = 56;

/// The word of a slot that is free, and of one that is being filled or emptied.
const FREE: u64 = 0;
const CLAIMED: u64 = 1 << 55;

struct HandleSlot {
    word: AtomicU64,
    object: AtomicPtr<()>,
}

type HandleTable = [HandleSlot; SLOTS];

/// One more than the largest [`Opaque::NUMBER`].
const KINDS: usize = 12;

/// By kind. Zeroed, so that it takes no room in the library's file.
static TABLES: [HandleTable; KINDS] = [const {
    [const { HandleSlot { word: AtomicU64::new(FREE), object: AtomicPtr::new(ptr::null_mut()) } };
        SLOTS]
}; KINDS];

static GENERATION: AtomicU64 = AtomicU64::new(1);

/// True if this process is a forked child of one that had handles.
static FORKED: AtomicBool = AtomicBool::new(false);

/// A type that C has opaque pointers to.
pub(crate) trait Opaque {
    /// The number in the handle; not zero, and less than [`KINDS`].
    const NUMBER: u8;
    /// Its name in C, for messages.
    const NAME: &'static str;
    /// Object behind a handle.
    type Object;
}

/// Declares a type that C has opaque pointers to, with the [`Opaque`] of its handles:
/// `name = number: Object`.
macro_rules! opaque {
    ($(#[$doc:meta])* $name:ident = $number:literal: $object:ty) => {
        $(#[$doc])*
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }

        impl crate::handle::Opaque for $name {
            const NUMBER: u8 = $number;
            const NAME: &'static str = stringify!($name);
            type Object = $object;
        }
    };
}

/// Defines functions of C that do one thing to what a handle stands for:
/// `type: Object; name(object, argument: type, ...) { body }`.
macro_rules! methods {
    (
        $type:ident: $target:ty;
        $($name:ident($object:ident $(, $arg:ident: $kind:ty)*) $body:block)*
    ) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            handle: *mut $type,
            $($arg: $kind,)*
        ) -> crate::error::farheap_status {
            crate::error::call(|| {
                // SAFETY: the caller does not free the handle during the call.
                let $object: &$target = unsafe { crate::handle::get(handle) }?;
                $body
            })
        }
    )*};
}

pub(crate) use {methods, opaque};

/// Makes a handle for `object`.
pub(crate) fn create<K: Opaque>(object: K::Object) -> Result<*mut K> {
    note_forks();
    for (index, slot) in table::<K>().iter().enumerate().skip(1) {
        if slot.word.load(Relaxed) != FREE
            || slot.word.compare_exchange(FREE, CLAIMED, Acquire, Relaxed).is_err()
        {
            continue;
        }
        let generation = GENERATION.fetch_add(1, Relaxed) & ((1 << 43) - 1);
        let handle = u64::from(K::NUMBER) << KIND_SHIFT | generation << SLOT_BITS | index as u64;
        slot.object.store(Box::into_raw(Box::new(object)).cast(), Relaxed);
        // Pairs with the Acquire in `get`.
        slot.word.store(handle, Release);
        return Ok(ptr::without_provenance_mut(handle as usize));
    }
    let message = format!("there are {} of {} already", SLOTS - 1, K::NAME);
    Err(Failure::new(FARHEAP_E_OUT_OF_MEMORY, message))
}

#[inline]
fn table<K: Opaque>() -> &'static HandleTable {
    const { assert!(K::NUMBER > 0 && (K::NUMBER as usize) < KINDS) };
    &TABLES[usize::from(K::NUMBER)]
}

#[inline]
fn slot_in(table: &HandleTable, handle: u64) -> &HandleSlot {
    &table[handle as usize & (SLOTS - 1)]
}

/// The object of a handle.
///
/// # Safety
/// Nobody frees the handle while the result is in use.
#[inline]
pub(crate) unsafe fn get<'a, K: Opaque>(handle: *const K) -> Result<&'a K::Object> {
    let number = handle.addr() as u64;
    let slot = slot_in(table::<K>(), number);
    // Pairs with the Release in `create`.
    let is_known = slot.word.load(Acquire) == number;
    // Null for the number 0, which is like the word of its slot.
    let object = slot.object.load(Relaxed).cast::<K::Object>();
    if !is_known || object.is_null() {
        return Err(explain::<K>(number));
    }
    // SAFETY: the word has its slot's number, for that is where the handle led, so it is a handle of
    // kind `K` (invariant 1), and stays so while the result lives, as the caller promises.
    Ok(unsafe { &*object })
}

/// Ends a handle; returns what it stood for.
pub(crate) fn take<K: Opaque>(handle: *mut K) -> Result<Box<K::Object>> {
    let number = handle.addr() as u64;
    let slot = slot_in(table::<K>(), number);
    // Of slot 0 nothing can be taken, and its word stays.
    if number == 0 || slot.word.compare_exchange(number, CLAIMED, Acquire, Relaxed).is_err() {
        return Err(explain::<K>(number));
    }
    let object = slot.object.swap(ptr::null_mut(), Relaxed).cast::<K::Object>();
    slot.word.store(FREE, Release);
    // SAFETY: a box of this type (invariant 1), owned by this call (invariant 2).
    Ok(unsafe { Box::from_raw(object) })
}

/// Describes a handle that is not of this process: one of the parent's, or none.
#[cold]
fn explain<K: Opaque>(handle: u64) -> Failure {
    if handle == 0 {
        return Failure::null(K::NAME);
    }
    // Whatever its kind is.
    let slot = TABLES.get((handle >> KIND_SHIFT) as usize).map(|table| slot_in(table, handle));
    if FORKED.load(Relaxed) && slot.is_some_and(|slot| slot.word.load(Relaxed) == !handle) {
        let message = format!("this {} belongs to the parent of this forked process", K::NAME);
        return Failure::new(FARHEAP_E_FORKED, message);
    }
    let message = format!("{handle:#x} is no {}, or was freed", K::NAME);
    Failure::new(FARHEAP_E_HANDLE, message)
}

/// True if this process was forked from one that had handles.
pub(crate) fn is_forked_child() -> bool {
    FORKED.load(Relaxed)
}

/// Sees to it that children refuse the handles of their parent.
fn note_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function only writes to atomics; it stays where it is, for the library is not
        // unloaded (`build.rs`). A failure (no memory) leaves children without
        // the check.
        unsafe { libc::pthread_atfork(None, None, Some(refuse_handles)) };
    });
}

extern "C" fn refuse_handles() {
    FORKED.store(true, Relaxed);
    for slot in TABLES.as_flattened() {
        let word = slot.word.load(Relaxed);
        // A second generation of children: what is inverted already stays so.
        if word >> KIND_SHIFT > 0 && word >> KIND_SHIFT < 0x80 {
            slot.word.store(!word, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::FARHEAP_E_NULL;
    use std::cell::Cell;
    use std::rc::Rc;

    struct Ship;
    impl Opaque for Ship {
        const NUMBER: u8 = 9;
        const NAME: &'static str = "ship";
        type Object = u64;
    }

    struct Crew;
    impl Opaque for Crew {
        const NUMBER: u8 = 10;
        const NAME: &'static str = "crew";
        type Object = Rc<Cell<u32>>;
    }

    fn status<T>(result: Result<T>) -> u32 {
        result.map(|_| ()).expect_err("refused").status()
    }

    #[test]
    fn a_freed_handle_is_refused_even_when_its_slot_is_used_again() {
        let first = create::<Ship>(1).expect("room");
        // SAFETY: freed below only.
        assert_eq!(*unsafe { get(first) }.expect("live"), 1);
        assert_eq!(*take(first).expect("live"), 1);
        let second = create::<Ship>(2).expect("room");
        assert_eq!(status(take(first)), FARHEAP_E_HANDLE);
        // SAFETY: refused.
        assert_eq!(status(unsafe { get(first) }), FARHEAP_E_HANDLE);
        assert_eq!(*take(second).expect("live"), 2);
    }

    #[test]
    fn handles_of_another_kind_and_arbitrary_numbers_are_refused() {
        let ship = create::<Ship>(1).expect("room");
        assert_eq!(status(take(ship.cast::<Crew>())), FARHEAP_E_HANDLE);
        let bits = (0..64).map(|bit| 1_usize << bit);
        for number in bits.chain([0, usize::MAX, !ship.addr(), ship.addr() ^ 1 << 20]) {
            let handle = ptr::without_provenance_mut::<Ship>(number);
            // SAFETY: refused.
            let refused = status(unsafe { get(handle) });
            let expected = if number == 0 { FARHEAP_E_NULL } else { FARHEAP_E_HANDLE };
            assert_eq!(refused, expected, "{number:#x}");
            assert_eq!(status(take(handle)), expected, "{number:#x}");
        }
        take(ship).expect("live");
    }

    #[test]
    fn ending_a_handle_drops_its_object_once() {
        let counter = Rc::new(Cell::new(0));
        let handle = create::<Crew>(Rc::clone(&counter)).expect("room");
        assert_eq!(Rc::strong_count(&counter), 2);
        drop(take(handle));
        assert_eq!(Rc::strong_count(&counter), 1);
        assert_eq!(status(take(handle)), FARHEAP_E_HANDLE);
    }
}
