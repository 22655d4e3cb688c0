//! Whose a chunk's pages are: the fillers' or the kernel's (`region::chunk`).
//!
//! A chunk is opened by a thread that latches it and then looks whether all its pages are in order;
//! a page is filled by a thread that makes it `Moving` and then looks whether the chunk is still
//! closed. Each does its write before its look, with a fence between: one of them sees the other.
//!
//! While a chunk is latched, words of mapped pages may become `Empty`: the chunk speaks for them.
//! Who takes an `Empty` word for a page without content looks at the chunk before *and* after, and
//! counts the word only when nobody has latched the chunk meanwhile ([`ChunkState::is_as_seen`]).

#![expect(unsafe_code, reason = "an atomic word is valid when zero")]

use crate::base::sync::{AtomicU32, Ordering, fence};

/// What a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Phase {
    /// Faults in the chunk are for the fillers.
    Closed = 0,
    /// A thread has latched the chunk.
    Busy = 1,
    /// The kernel fills the chunk.
    Open = 2,
}

const PHASE_MASK: u32 = 3;
/// One time more that a chunk was latched. The count wraps; who compares two looks would have to
/// sleep through all of it.
const LATCHED_ONCE: u32 = PHASE_MASK + 1;

/// A chunk's phase, and how often it has been latched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u32);

impl Seen {
    pub(crate) fn phase(self) -> Phase {
        match self.0 & PHASE_MASK {
            0 => Phase::Closed,
            1 => Phase::Busy,
            2 => Phase::Open,
            other => unreachable!("chunk phase {other}"),
        }
    }

    fn with(self, phase: Phase) -> u32 {
        self.0 & !PHASE_MASK | phase as u32
    }
}

/// The state of one chunk.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct ChunkState(AtomicU32);
// SAFETY: transparent over an atomic integer, for which zero is valid; zero is `Closed`.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for ChunkState {}

impl ChunkState {
    pub(crate) fn look(&self) -> Seen {
        // Acquire: pairs with the release of who gave the latch back.
        Seen(self.0.load(Ordering::Acquire))
    }

    /// Latches a chunk that is in the phase `from`.
    pub(crate) fn latch(&self, from: Phase) -> bool {
        let seen = Seen(self.0.load(Ordering::Relaxed));
        let busy = seen.with(Phase::Busy).wrapping_add(LATCHED_ONCE);
        let latched = seen.phase() == from
            && self.0.compare_exchange(seen.0, busy, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Pairs with the fence in `is_still_closed`.
        fence(Ordering::SeqCst);
        latched
    }

    /// Gives the caller's latch back.
    pub(crate) fn unlatch(&self, to: Phase) {
        let seen = Seen(self.0.load(Ordering::Relaxed));
        self.0.store(seen.with(to), Ordering::Release);
    }

    /// Whether a page that the caller has just made `Moving` is in a chunk that is closed: it may
    /// have been opened since the caller looked last.
    pub(crate) fn is_still_closed(&self) -> bool {
        // Pairs with the fence in `latch`.
        fence(Ordering::SeqCst);
        self.look().phase() == Phase::Closed
    }

    /// Whether nobody has latched the chunk since it looked like `seen`. Then the words that were
    /// loaded in between, from a closed chunk, say what the pages hold: a thread that changes a
    /// word for the chunk latches it before, and who loads that word sees the latch as well.
    pub(crate) fn is_as_seen(&self, seen: Seen) -> bool {
        self.look() == seen
    }
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
            let chunk = Arc::new((ChunkState::default(), PageWord::default()));
            let filler = thread::spawn({
                let chunk = chunk.clone();
                move || {
                    let (state, word) = &*chunk;
                    let moving = Word::moving(None);
                    if state.look().phase() != Phase::Closed
                        || word.try_change(Word::EMPTY, moving).is_err()
                    {
                        return false;
                    }
                    if state.is_still_closed() {
                        return true; // It fills the page, which stays `Moving` for long.
                    }
                    word.try_change(moving, Word::EMPTY).expect("the filler's page");
                    false
                }
            });
            let (state, word) = &*chunk;
            assert!(state.latch(Phase::Closed), "nobody else latches it");
            let opened = word.load() == Word::EMPTY;
            state.unlatch(if opened { Phase::Open } else { Phase::Closed });
            let filled = filler.join().expect("no panic");
            assert!(!(opened && filled), "the kernel's and the filler's");
        });
    }

    /// A page that a discard finds `Empty` while another thread takes it over for its chunk, which
    /// is opened, or closed again at once: the page's memory is gone when the discard is over.
    #[test]
    fn loom_a_page_is_discarded_whoever_has_it() {
        for opens in [true, false] {
            loom::model(move || discard_beside_opening(opens));
        }
    }

    fn discard_beside_opening(opens: bool) {
        let chunk = Arc::new((ChunkState::default(), PageWord::default(), AtomicU32::new(1)));
        let (moving, resident) = (Word::moving(None), Word::resident(None));
        chunk.1.try_change(Word::EMPTY, moving).expect("fresh");
        chunk.1.try_change(moving, resident).expect("this thread's");
        let opener = thread::spawn({
            let chunk = chunk.clone();
            move || {
                let (state, word, mapped) = &*chunk;
                if !state.latch(Phase::Closed) {
                    return; // The discard has found it open: not in this model.
                }
                let adopted = word.try_change(resident, moving).is_ok();
                if adopted {
                    word.try_change(moving, Word::EMPTY).expect("this thread's");
                }
                if opens && word.load() == Word::EMPTY {
                    return state.unlatch(Phase::Open);
                }
                // Handed over again: what is mapped is resident.
                if mapped.load(Ordering::Relaxed) == 1
                    && word.try_change(Word::EMPTY, moving).is_ok()
                {
                    word.try_change(moving, resident).expect("this thread's");
                }
                state.unlatch(Phase::Closed);
            }
        });
        let (state, word, mapped) = &*chunk;
        loop {
            let seen = state.look();
            match seen.phase() {
                Phase::Busy => thread::yield_now(),
                Phase::Open => {
                    if state.latch(Phase::Open) {
                        mapped.store(0, Ordering::Relaxed);
                        state.unlatch(Phase::Open);
                        break;
                    }
                }
                Phase::Closed => {
                    match word.load() {
                        now if now == resident && word.try_change(now, moving).is_ok() => {
                            mapped.store(0, Ordering::Relaxed);
                            word.try_change(moving, Word::EMPTY).expect("this thread's");
                        }
                        Word::EMPTY => {}
                        _ => {
                            thread::yield_now();
                            continue;
                        }
                    }
                    if state.is_as_seen(seen) {
                        break;
                    }
                }
            }
        }
        opener.join().expect("no panic");
        assert_eq!(mapped.load(Ordering::Relaxed), 0, "content that was discarded");
    }
}
