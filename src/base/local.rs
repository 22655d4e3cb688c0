//! Allocations of the library's own that are never far.
//!
//! With farheap as the program's global allocator, what a pool or a region keeps about its pages
//! would be placed by size or by the host's scope like everything else. If it were far, a thread that
//! makes room for far memory could fault on it, and wait for itself. The heap above tells how a
//! thread's allocations are kept local ([`set_pins`]); the layers below ask for it ([`keep_local`]).

use std::marker::PhantomData;
use std::sync::OnceLock;

/// How the calling thread's allocations are kept local, and how that ends. Calls nest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinHooks {
    pub(crate) pin: fn(),
    pub(crate) unpin: fn(),
}

static PINS: OnceLock<PinHooks> = OnceLock::new();

/// Registers the heap's way. Until then there is no far memory, and everything is local.
pub(crate) fn set_pins(pins: PinHooks) {
    PINS.get_or_init(|| pins);
}

/// Keeps this thread's allocations local while it lives.
#[must_use = "it ends when this is dropped"]
pub(crate) struct KeptLocal {
    unpin: Option<fn()>,
    /// Pins belong to their thread.
    not_send: PhantomData<*const ()>,
}

/// Keeps this thread's allocations local until the guard is dropped.
pub(crate) fn keep_local() -> KeptLocal {
    let pins = PINS.get();
    if let Some(pins) = pins {
        (pins.pin)();
    }
    KeptLocal { unpin: pins.map(|pins| pins.unpin), not_send: PhantomData }
}

impl Drop for KeptLocal {
    fn drop(&mut self) {
        if let Some(unpin) = self.unpin {
            unpin();
        }
    }
}
