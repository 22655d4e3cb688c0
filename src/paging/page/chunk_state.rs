//! Whose a chunk's pages are: the handlers' or the kernel's (`kernel_filled`).
//!
//! A chunk is opened by a thread that latches it and then looks whether all its pages are in order;
//! a page is filled by a thread that makes it `Moving` and then looks whether the chunk is still
//! closed. Each does its write before its look, with a fence between: one of them sees the other.
//!
//! While a chunk is latched, words of mapped pages may become `Empty`: the chunk speaks for them.
//! Who takes an `Empty` word for a page without content looks at the chunk before *and* after, and
//! counts the word only when nobody has latched the chunk meanwhile ([`ChunkState::is_as_seen`]).
//!
//! The tables of a chunk whose words are all `Empty` can be dropped (`tables`). A thread that
//! charges them and then changes a word has *entered* the chunk, and a thread that drops them has
//! latched it while nobody was within:
//!
//! ```text
//!   Closed, n within --enter--> Closed, n+1 --charge, Empty -> Moving, leave--> Closed, n
//!   Closed, 0 within --latch_unentered--> Busy --all Empty: uncharge, drop--> Closed
//! ```

#![expect(unsafe_code, reason = "an atomic word is valid when zero")]

use crate::base::sync::{AtomicU64, Ordering, fence};

/// State of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Phase {
    /// Faults in the chunk are for the handlers.
    Closed = 0,
    /// A thread has latched the chunk.
    Busy = 1,
    /// The kernel fills the chunk.
    Open = 2,
}

const PHASE_MASK: u64 = 3;
/// A thread more that is within the chunk's tables ([`ChunkState::enter`]).
const ENTERED_ONCE: u64 = PHASE_MASK + 1;
const ENTERED_MASK: u64 = 0x3FFF * ENTERED_ONCE;
/// One time more that a chunk was latched. The count wraps; who compares two looks would have to
/// sleep through all of it.
const LATCHED_ONCE: u64 = ENTERED_MASK + ENTERED_ONCE;

fn phase_of(bits: u64) -> Phase {
    match bits & PHASE_MASK {
        0 => Phase::Closed,
        1 => Phase::Busy,
        2 => Phase::Open,
        other => unreachable!("chunk phase {other}"),
    }
}

/// A chunk's phase, and how often it has been latched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkView(u64);

impl ChunkView {
    pub(crate) fn phase(self) -> Phase {
        phase_of(self.0)
    }
}

/// The state of one chunk.
///
/// ```text
///  63..16 times latched | 15..2 threads that have entered | 1..0 phase
/// ```
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct ChunkState(AtomicU64);
// SAFETY: transparent over an atomic integer, for which zero is valid; zero is `Closed`.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for ChunkState {}

/// A closed chunk whose tables stay until this is dropped.
#[derive(Debug)]
pub(crate) struct Entered<'a>(&'a ChunkState);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Release: who latches the chunk to drop its tables sees the words that were changed.
        self.0.0.fetch_sub(ENTERED_ONCE, Ordering::Release);
    }
}

impl ChunkState {
    pub(crate) fn look(&self) -> ChunkView {
        // Acquire: pairs with the release of who gave the latch back.
        ChunkView(self.0.load(Ordering::Acquire) & !ENTERED_MASK)
    }

    /// Enters a closed chunk: its tables are not dropped before the thread leaves. A page's word
    /// may become other than `Empty` only between the two, or by the thread that has latched the
    /// chunk; then the word keeps the tables. `None` while the chunk is not closed.
    pub(crate) fn enter(&self) -> Option<Entered<'_>> {
        let mut now = self.0.load(Ordering::Relaxed);
        while phase_of(now) == Phase::Closed && now & ENTERED_MASK != ENTERED_MASK {
            let entered = now + ENTERED_ONCE;
            // Acquire: tables that were dropped before are seen as dropped.
            match self.0.compare_exchange(now, entered, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Entered(self)),
                Err(other) => now = other,
            }
        }
        None
    }

    /// Latches a chunk that is in the phase `from`.
    pub(crate) fn latch(&self, from: Phase) -> bool {
        let latched = self.try_latch(from, ENTERED_MASK);
        // Pairs with the fence in `is_still_closed`.
        fence(Ordering::SeqCst);
        latched
    }

    /// Latches a closed chunk that nobody has entered: its tables are this thread's.
    pub(crate) fn latch_unentered(&self) -> bool {
        self.try_latch(Phase::Closed, 0)
    }

    /// True if a thread is at the chunk at this moment.
    pub(crate) fn is_busy(&self) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        phase_of(now) == Phase::Busy || now & ENTERED_MASK != 0
    }

    fn try_latch(&self, from: Phase, entered: u64) -> bool {
        let mut now = self.0.load(Ordering::Relaxed);
        while phase_of(now) == from && now & ENTERED_MASK & !entered == 0 {
            let busy = (now & !PHASE_MASK | Phase::Busy as u64).wrapping_add(LATCHED_ONCE);
            match self.0.compare_exchange(now, busy, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
        false
    }

    /// Gives the caller's latch back.
    pub(crate) fn unlatch(&self, to: Phase) {
        // Threads may leave meanwhile.
        let change = (to as u64).wrapping_sub(Phase::Busy as u64);
        self.0.fetch_add(change, Ordering::Release);
    }

    /// True if a page that the caller has just made `Moving` is in a chunk that is closed: it may
    /// have been opened since the caller looked last.
    pub(crate) fn is_still_closed(&self) -> bool {
        // Pairs with the fence in `latch`.
        fence(Ordering::SeqCst);
        self.look().phase() == Phase::Closed
    }

    /// True if nobody has latched the chunk since it looked like `seen`. Then the words that were
    /// loaded in between, from a closed chunk, say what the pages hold: a thread that changes a
    /// word for the chunk latches it before, and who loads that word sees the latch as well.
    pub(crate) fn is_as_seen(&self, seen: ChunkView) -> bool {
        self.look() == seen
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::base::sync::AtomicU32;
    use crate::paging::page::word::{PageWord, Word};
    use loom::thread;
    use std::sync::Arc;

    /// A handler maps zeros as a page while another thread opens the page's chunk: the page is the
    /// handler's or the chunk is the kernel's, never both.
    #[test]
    fn loom_a_page_is_not_filled_while_its_chunk_is_opened() {
        loom::model(|| {
            let chunk = Arc::new((ChunkState::default(), PageWord::default()));
            let handler = thread::spawn({
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
                    word.try_change(moving, Word::EMPTY).expect("the handler's page");
                    false
                }
            });
            let (state, word) = &*chunk;
            assert!(state.latch(Phase::Closed), "nobody else latches it");
            let opened = word.load() == Word::EMPTY;
            state.unlatch(if opened { Phase::Open } else { Phase::Closed });
            let filled = handler.join().expect("no panic");
            assert!(!(opened && filled), "the kernel's and the handler's");
        });
    }

    /// Two threads fill pages while a third drops the tables: a thread that has changed a word has
    /// tables that are charged, and no word is lost.
    #[test]
    fn loom_tables_stay_while_a_word_needs_them() {
        loom::model(|| {
            // The chunk, words of two pages, and whether their tables are charged.
            type Shared = (ChunkState, [PageWord; 2], AtomicU32);
            let shared: Arc<Shared> = Arc::new(Default::default());
            let handler = |page: usize| {
                let shared = shared.clone();
                move || {
                    let (state, words, charged) = &*shared;
                    let Some(entered) = state.enter() else { return false };
                    charged.store(1, Ordering::Relaxed);
                    let moving = Word::moving(None);
                    words[page].try_change(Word::EMPTY, moving).expect("nobody else's page");
                    drop(entered);
                    words[page].try_change(moving, Word::resident(None)).expect("not dropped");
                    assert_eq!(charged.load(Ordering::Relaxed), 1, "tables of a page in use");
                    true
                }
            };
            let handlers = [thread::spawn(handler(0)), thread::spawn(handler(1))];
            let (state, words, charged) = &*shared;
            if state.latch_unentered() {
                if words.iter().all(|word| word.load() == Word::EMPTY) {
                    charged.store(0, Ordering::Relaxed);
                    thread::yield_now();
                    // What the kernel drops is what was looked at.
                    assert!(words.iter().all(|word| word.load() == Word::EMPTY), "a word is lost");
                }
                state.unlatch(Phase::Closed);
            }
            let filled = handlers.map(|handler| handler.join().expect("no panic"));
            for (word, filled) in words.iter().zip(filled) {
                assert_eq!(word.load() == Word::EMPTY, !filled);
            }
        });
    }

    /// A page that a discard finds `Empty` while another thread takes it over for its chunk, which
    /// is opened, or closed again at once: the page's memory is gone when the discard is over.
    #[test]
    fn loom_a_page_is_discarded_whatever_thread_has_it() {
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
