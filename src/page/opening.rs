//! Whose a chunk's pages are: the fillers' or the kernel's (`region::chunk`).
//!
//! A chunk is opened by a thread that latches it and then looks whether all its pages are in order;
//! a page is filled by a thread that makes it `Moving` and then looks whether the chunk is still
//! closed. Each does its write before its look, with a fence between: one of them sees the other.

use crate::base::sync::{AtomicU32, Ordering, fence};

/// Faults in the chunk are for the fillers.
pub(crate) const CLOSED: u32 = 0;
/// A thread has latched the chunk.
pub(crate) const BUSY: u32 = 1;
/// The kernel fills the chunk.
pub(crate) const OPEN: u32 = 2;

/// Latches a chunk that is in the state `from`.
pub(crate) fn latch(state: &AtomicU32, from: u32) -> bool {
    // Acquire: pairs with the release of who gave the latch back.
    let latched = state.compare_exchange(from, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
    // Pairs with the fence in `is_still_closed`.
    fence(Ordering::SeqCst);
    latched
}

/// Whether a page that the caller has just made `Moving` is in a chunk that is closed: it may have
/// been opened since the caller looked last.
pub(crate) fn is_still_closed(state: &AtomicU32) -> bool {
    // Pairs with the fence in `latch`.
    fence(Ordering::SeqCst);
    state.load(Ordering::Acquire) == CLOSED
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::page::word::{PageWord, Word};
    use loom::thread;
    use std::sync::Arc;

    /// A filler maps zeros as a page while another thread opens the page's chunk: the page is the
    /// filler's or the chunk is the kernel's, never both.
    #[test]
    fn loom_a_page_is_not_filled_while_its_chunk_is_opened() {
        loom::model(|| {
            let chunk = Arc::new((AtomicU32::new(CLOSED), PageWord::default()));
            let filler = thread::spawn({
                let chunk = chunk.clone();
                move || {
                    let (state, word) = &*chunk;
                    let moving = Word::moving(None);
                    if state.load(Ordering::Acquire) != CLOSED
                        || word.try_change(Word::EMPTY, moving).is_err()
                    {
                        return false;
                    }
                    if is_still_closed(state) {
                        return true; // It fills the page, which stays `Moving` for long.
                    }
                    word.try_change(moving, Word::EMPTY).expect("the filler's page");
                    false
                }
            });
            let (state, word) = &*chunk;
            let opened = latch(state, CLOSED) && word.load() == Word::EMPTY;
            state.store(if opened { OPEN } else { CLOSED }, Ordering::Release);
            let filled = filler.join().expect("no panic");
            assert!(!(opened && filled), "the kernel's and the filler's");
        });
    }
}
