//! The note of one chunk: 512 pages, whose words share one kernel page.
//!
//! ```text
//! 63..27 first version | 26..8 threads that entered | 5 kept | 4 tables | 3 huge | 2 frozen
//!     | 1 huge page of words charged | 0 charged
//!
//!   not charged --begin_use--> charged, 1 within --leave--> charged <--enter, leave--> charged, n within
//!        ^                                                     |
//!        '-- end_drop -- frozen, not charged <-- begin_drop ---'  (nobody within)
//!                                  '------ undo_drop ----> charged
//! ```
//! `charged`: the chunk's words are within the limit. `tables`: its page tables are. `kept`: what is
//! charged once and stays. `frozen`: one thread changes the memory of the chunk
//! as a whole: it moves it away, drops it with absent neighbours, collapses it, or gives the words back.
//! `huge`: all its memory lies in one huge page.
//!
//! A thread that makes an absent page of the chunk `Locked` has *entered* the chunk, or holds another
//! page of it that keeps the words. A word that was given back is zero; when the chunk is charged again
//! all of its words begin with the `first version`, which none of them has had: a thread that looked at
//! a page before does not take the page that is there now for it.
//!
//! # Invariants
//! 1. Words are given back only while the chunk is frozen and not charged, all of them are absent,
//!    and nobody is within.
#![expect(unsafe_code, reason = "an atomic word is valid when zero")]

use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering};

const CHARGED: u64 = 1;
/// In the first chunk of a huge page of words.
const HUGE_WORDS_CHARGED: u64 = 1 << 1;
const FROZEN: u64 = 1 << 2;
const HUGE: u64 = 1 << 3;
const TABLES: u64 = 1 << 4;
const KEPT: u64 = 1 << 5;
const ENTERED_ONCE: u64 = 1 << 8;
const ENTERED_MASK: u64 = 0x7FFFF * ENTERED_ONCE;
/// Above, as many bits as a version has in a page's word.
const VERSION_SHIFT: u32 = 27;

/// The note of one chunk.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct ChunkNote(AtomicU64);
// SAFETY: transparent over an atomic integer, for which zero is valid; zero is "never used".
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for ChunkNote {}

/// A charged chunk, whose words stay until this is dropped.
#[derive(Debug)]
#[must_use = "the chunk is left when this is dropped"]
pub(crate) struct ChunkHold<'a>(&'a ChunkNote);

impl Drop for ChunkHold<'_> {
    fn drop(&mut self) {
        // Release: the thread that gives the words back sees what was made of them.
        self.0.0.fetch_sub(ENTERED_ONCE, Ordering::Release);
    }
}

impl ChunkNote {
    fn has(&self, flag: u64) -> bool {
        self.0.load(Ordering::Relaxed) & flag != 0
    }

    pub(crate) fn is_charged(&self) -> bool {
        self.has(CHARGED)
    }

    /// True if the page tables are charged, with the words or since before these were given back.
    pub(crate) fn has_tables(&self) -> bool {
        self.has(TABLES)
    }

    /// True if what stays is charged.
    pub(crate) fn is_kept(&self) -> bool {
        self.has(KEPT)
    }

    /// Enters a charged chunk. `None` while it is not charged.
    pub(crate) fn enter(&self) -> Option<ChunkHold<'_>> {
        let mut now = self.0.load(Ordering::Relaxed);
        while now & CHARGED != 0 && now & ENTERED_MASK != ENTERED_MASK {
            // Acquire: words that were given back before are seen as they begin now.
            let entered = now + ENTERED_ONCE;
            match self.0.compare_exchange_weak(now, entered, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(ChunkHold(self)),
                Err(other) => now = other,
            }
        }
        None
    }

    /// The version with which the words begin when the chunk is charged.
    pub(crate) fn first_version(&self) -> u64 {
        self.0.load(Ordering::Relaxed) >> VERSION_SHIFT
    }

    /// The words are charged, and have their first version; the caller has entered. One thread at a
    /// time charges or gives back.
    pub(crate) fn begin_use(&self) -> ChunkHold<'_> {
        // Release: a thread that enters sees the words.
        let was = self.0.fetch_or(CHARGED | TABLES | KEPT, Ordering::Release);
        strict_assert!(was & (CHARGED | FROZEN) == 0, "begin of use at {was:#x}");
        self.0.fetch_add(ENTERED_ONCE, Ordering::Relaxed);
        ChunkHold(self)
    }

    /// Begins to give the words back, if nobody is within and nothing else is done to the chunk. Then
    /// nobody enters before the end.
    pub(crate) fn begin_drop(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        let is_open = seen & CHARGED != 0 && seen & (ENTERED_MASK | FROZEN | HUGE) == 0;
        let dropping = seen ^ (CHARGED | FROZEN);
        // Acquire: pairs with the release of the last that left.
        is_open
            && self.0.compare_exchange(seen, dropping, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// A word is in use: the chunk is as before.
    pub(crate) fn undo_drop(&self) {
        self.0.fetch_xor(CHARGED | FROZEN, Ordering::Release);
    }

    /// The words were given back; they will begin with `first_version`. `tables`: the page tables
    /// were not.
    pub(crate) fn end_drop(&self, first_version: u64, tables: bool) {
        let flags = self.0.load(Ordering::Relaxed) & (HUGE_WORDS_CHARGED | TABLES | KEPT);
        let flags = if tables { flags } else { flags & !TABLES };
        // Nobody else changes the note of a chunk that is not charged.
        self.0.store(first_version << VERSION_SHIFT | flags, Ordering::Release);
    }

    /// Notes that the huge page of words that begins with this chunk is charged; `false`: it was.
    pub(crate) fn charge_huge_words(&self) -> bool {
        self.0.fetch_or(HUGE_WORDS_CHARGED, Ordering::Relaxed) & HUGE_WORDS_CHARGED == 0
    }

    pub(crate) fn has_huge_words(&self) -> bool {
        self.has(HUGE_WORDS_CHARGED)
    }

    /// Reserves the chunk's memory for one change of all of it; `false` while another thread does so, or
    /// when it has no words.
    pub(crate) fn try_freeze(&self) -> bool {
        let seen = self.0.load(Ordering::Acquire);
        seen & (FROZEN | CHARGED) == CHARGED
            && self
                .0
                .compare_exchange(seen, seen | FROZEN, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    pub(crate) fn unfreeze(&self) {
        self.0.fetch_and(!FROZEN, Ordering::Release);
    }

    /// True if the chunk is neither huge nor frozen.
    pub(crate) fn is_plain(&self) -> bool {
        !self.has(HUGE | FROZEN)
    }

    pub(crate) fn is_huge(&self) -> bool {
        self.has(HUGE)
    }

    /// Notes that the chunk, whose pages the caller holds still, was collapsed.
    pub(crate) fn set_huge(&self) {
        // Pairs with the acquire of the thread that locks one of the pages next.
        self.0.fetch_or(HUGE, Ordering::Release);
    }

    /// Notes that the chunk's memory does not lie in a huge page any more; `false` when it did not.
    pub(crate) fn end_huge(&self) -> bool {
        self.0.fetch_and(!HUGE, Ordering::Relaxed) & HUGE != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_dropped_only_when_nobody_is_within_and_nothing_else_is_done_to_it() {
        let note = ChunkNote::default();
        assert!(note.enter().is_none() && !note.begin_drop() && !note.try_freeze());
        let within = note.begin_use();
        let other = note.enter().expect("charged");
        drop(within);
        assert!(!note.begin_drop(), "another is within");
        drop(other);
        assert!(note.try_freeze() && !note.begin_drop(), "frozen");
        note.unfreeze();
        note.set_huge();
        assert!(!note.begin_drop(), "huge");
        assert!(note.end_huge() && note.begin_drop());
        assert!(note.enter().is_none() && !note.try_freeze() && !note.begin_drop());
        note.undo_drop();
        assert!(note.is_charged() && note.begin_drop());
        note.end_drop(7, false);
        assert_eq!((note.first_version(), note.is_charged(), note.has_tables()), (7, false, false));
        assert!(note.is_kept());
        drop(note.begin_use());
        assert!(note.begin_drop());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::base::sync::AtomicU32;
    use crate::pool_latch::{Latch, LatchWord};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// A chunk of two pages; `charged` is what the limit thinks of its words.
    #[derive(Default)]
    struct Chunk {
        note: ChunkNote,
        changing: Mutex<()>,
        charged: AtomicU32,
    }

    struct Shared {
        chunk: Chunk,
        words: [Latch; 2],
        /// Content of page 0 on the device, and in memory.
        content: AtomicU32,
    }

    /// As `PoolChunks::enter`.
    fn enter(shared: &Shared) -> ChunkHold<'_> {
        let chunk = &shared.chunk;
        loop {
            if let Some(entered) = chunk.note.enter() {
                return entered;
            }
            let _changing = chunk.changing.lock().expect("no panic");
            if chunk.note.is_charged() {
                continue;
            }
            chunk.charged.store(1, Ordering::Relaxed);
            for word in &shared.words {
                word.begin_at(chunk.note.first_version());
            }
            return chunk.note.begin_use();
        }
    }

    /// As `PoolFrames::give_back`.
    fn give_back(shared: &Shared, unused: bool) {
        let chunk = &shared.chunk;
        let _changing = chunk.changing.lock().expect("no panic");
        if !chunk.note.begin_drop() {
            return;
        }
        let is_droppable = |word: LatchWord| word.is_droppable() || unused && word.is_unused();
        if !shared.words.iter().all(|word| is_droppable(word.load())) {
            chunk.note.undo_drop();
            return;
        }
        let first = chunk.note.first_version();
        let next = LatchWord::version_after(first, shared.words.iter().map(Latch::load));
        shared.words.iter().for_each(Latch::given_back);
        chunk.charged.store(0, Ordering::Relaxed);
        chunk.note.end_drop(next, false);
    }

    /// As `Loader::load`; the page stays resident, and free.
    fn load(shared: &Shared, page: usize) -> bool {
        let latch = &shared.words[page];
        let entered = enter(shared);
        let is_locked = latch.try_begin_load(latch.load());
        drop(entered);
        if is_locked {
            latch.loaded(false, 0);
            latch.unlock(false);
        }
        is_locked
    }

    fn evict(shared: &Shared, page: usize) {
        let latch = &shared.words[page];
        if latch.try_lock_victim(latch.load()) {
            latch.evicted(1);
            give_back(shared, false);
        }
    }

    fn shared() -> Arc<Shared> {
        let words = [Latch::absent(), Latch::absent()];
        Arc::new(Shared { chunk: Chunk::default(), words, content: AtomicU32::new(0) })
    }

    /// Two threads load a page each, and one of them evicts its own: a page that is resident keeps its
    /// word, and words of resident pages are charged.
    #[test]
    fn loom_words_stay_while_a_page_needs_them() {
        loom::model(|| {
            let shared = shared();
            let other = thread::spawn({
                let shared = Arc::clone(&shared);
                move || load(&shared, 1)
            });
            if load(&shared, 0) {
                evict(&shared, 0);
            }
            assert!(other.join().expect("no panic"), "nobody else loads it");
            assert!(shared.words[1].load().is_free(), "its word was given back");
            assert_eq!(shared.chunk.charged.load(Ordering::Relaxed), 1, "not charged");
            assert!(shared.chunk.note.is_charged());
        });
    }

    /// A page of the table is freed, the table ends before it, and its word is given back, while a thread
    /// that saw it in the table loads it: it is loaded before, or not at all.
    #[test]
    fn loom_a_page_that_left_the_table_is_loaded_by_nobody() {
        loom::model(|| {
            let shared = shared();
            // `content` is where the table ends: page 1 is in it, and absent.
            shared.content.store(2, Ordering::Relaxed);
            drop(enter(&shared));
            let loader = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let latch = &shared.words[1];
                    let entered = enter(&shared);
                    let was = latch.load();
                    if was.is_absent() && !was.is_unused() && latch.try_begin_load(was) {
                        if shared.content.load(Ordering::Acquire) > 1 {
                            latch.loaded(false, 0);
                            latch.unlock(false);
                        } else {
                            latch.abort_load();
                        }
                    }
                    drop(entered);
                }
            });
            // The page is fixed and freed, as `allocate::free` does.
            let (latch, entered) = (&shared.words[1], enter(&shared));
            let seen = latch.load();
            let is_held = latch.try_begin_load(seen) || latch.try_lock(seen);
            drop(entered);
            if is_held {
                latch.freed();
                // As `allocate::cut_tail`.
                let seen = latch.load();
                if seen.is_unused() && latch.try_begin_load(seen) {
                    shared.content.store(1, Ordering::Release);
                    latch.abort_load();
                    give_back(&shared, true);
                }
            }
            loader.join().expect("no panic");
            let is_in_table = shared.content.load(Ordering::Relaxed) > 1;
            assert!(is_in_table || latch.load().is_absent(), "{:?} behind the end", latch.load());
        });
    }

    /// A page is evicted, its word given back, and the page loaded with another content, while a reader
    /// looks at it: what it reads is one of the two.
    #[test]
    fn loom_a_reader_never_takes_a_page_for_the_one_before() {
        loom::model(|| {
            let shared = shared();
            assert!(load(&shared, 0));
            let writer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    evict(&shared, 0);
                    shared.content.store(1, Ordering::Relaxed);
                    load(&shared, 0);
                }
            });
            let latch = &shared.words[0];
            let seen = latch.load();
            if seen.is_readable() {
                let first = shared.content.load(Ordering::Relaxed);
                let second = shared.content.load(Ordering::Relaxed);
                assert!(!latch.is_unchanged(seen) || first == second, "{first} and {second}");
            }
            writer.join().expect("no panic");
        });
    }
}
