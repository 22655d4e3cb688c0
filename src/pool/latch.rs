//! The pool's page word: latch, replacement state and version of one page, in 64 bits.
//!
//! ```text
//!  63 ready | 62..55 latch | 54 dirty | 53 writing | 52 cool | 51..50 heat | 46..37 stamp | 36..0 version
//!
//!            begin_load            loaded, unlock
//!   Absent ------------> Locked <----------------> Free <-------> Shared(1..=252)
//!      ^                   |  ^      lock           share/unshare    |
//!      '------ evicted ----'  '---------- upgrade/downgrade (1) -----'
//! ```
//! | latch | memory | threads that may change the word |
//! |---|---|---|
//! | `Absent` (0) | none; an optimistic reader that comes too late sees zeros and fails to validate | the one that enters `Locked`, or allocates the page |
//! | `Free` (1) | the page's content | all, by compare-and-swap |
//! | `Shared(n)` (n + 1) | the page's content, which does not change | all, by compare-and-swap; each holder takes its own count back |
//! | `Locked` (255) | the holder's alone | the holder |
//!
//! `ready`: the latch is `Free` or `Shared` and the page is not `cool`: a hit is decided by one test of
//! a sign. `dirty`: the content is newer than the device's. `writing`: one of the shared holders writes
//! the page back, or holds it still. `cool`: the page was not touched since the hand passed. `heat`:
//! laps of the hand the page has left; in an absent page, [`HEAT_UNUSED`] says that the page is not allocated.
//! `stamp`: when the page was evicted, 0 for never. `version`: grows with every change of the content
//! and every eviction.
//! Words of which no page is resident may be given back, and begin anew then: `chunk_note`.
//!
//! # Invariants
//! 1. A word whose version is the same before and after a read, and that was neither `Absent` nor
//!    `Locked` at either time, saw no change of the content in between.
//! 2. `Locked` is left only by the thread that entered it.
//! 3. All bits zero is a page that was never touched, or whose word was given back.
//! 4. `ready` follows from latch and `cool`, in every value the word ever has.
#![expect(unsafe_code, reason = "an atomic word is valid when zero")]

use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering, fence};
use std::fmt;

const READY: u64 = 1 << 63;
const LATCH_SHIFT: u32 = 55;
const LATCH_MASK: u64 = 0xFF << LATCH_SHIFT;
const ABSENT: u64 = 0;
const FREE: u64 = 1;
const LOCKED: u64 = 255;
/// Maximum number of shared holders of one page.
pub(crate) const SHARED_MAX: u64 = 252;
const DIRTY: u64 = 1 << 54;
const WRITING: u64 = 1 << 53;
const COOL: u64 = 1 << 52;
const HEAT_SHIFT: u32 = 50;
const HEAT_MASK: u64 = 3 << HEAT_SHIFT;
/// Largest heat.
pub(crate) const HEAT_MAX: u8 = 3;
/// The heat of an absent page that is not allocated.
const HEAT_UNUSED: u8 = 3;
const STAMP_SHIFT: u32 = 37;
const STAMP_MASK: u64 = 0x3FF << STAMP_SHIFT;
const VERSION_MASK: u64 = (1 << STAMP_SHIFT) - 1;

/// Values of the eviction clock that a stamp tells apart; 0 is "never".
pub(crate) const STAMPS: u64 = 1023;

/// The holders of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Absent,
    Free,
    Shared(u64),
    Locked,
}

/// A value of a latch word.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LatchWord(u64);

impl LatchWord {
    #[inline]
    fn latch(self) -> u64 {
        (self.0 & LATCH_MASK) >> LATCH_SHIFT
    }

    #[inline]
    pub(crate) fn holder(self) -> Holder {
        match self.latch() {
            ABSENT => Holder::Absent,
            FREE => Holder::Free,
            LOCKED => Holder::Locked,
            n => Holder::Shared(n - 1),
        }
    }

    /// True if the content can be read optimistically, without a note that it is touched.
    #[inline]
    pub(crate) fn is_ready(self) -> bool {
        (self.0 as i64) < 0
    }

    /// True if the content can be read optimistically.
    #[inline]
    pub(crate) fn is_readable(self) -> bool {
        // Neither `ABSENT`, which comes out above all, nor `LOCKED`: one comparison.
        self.latch().wrapping_sub(FREE) < LOCKED - FREE
    }

    /// True if one more reader can hold the page.
    #[inline]
    pub(crate) fn has_room(self) -> bool {
        self.latch() <= SHARED_MAX
    }

    #[inline]
    pub(crate) fn is_absent(self) -> bool {
        self.latch() == ABSENT
    }

    #[inline]
    pub(crate) fn is_free(self) -> bool {
        self.latch() == FREE
    }

    /// True if the page is free, clean and without heat: nothing keeps it.
    #[inline]
    pub(crate) fn is_idle(self) -> bool {
        self.is_free() && self.is_worthless()
    }

    /// True if a resident page is clean and without heat, whatever its holders.
    #[inline]
    pub(crate) fn is_worthless(self) -> bool {
        self.0 & (DIRTY | HEAT_MASK) == 0
    }

    #[inline]
    pub(crate) fn dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    #[inline]
    pub(crate) fn writing(self) -> bool {
        self.0 & WRITING != 0
    }

    #[inline]
    pub(crate) fn cool(self) -> bool {
        self.0 & COOL != 0
    }

    /// True if the hand takes the page when it passes next: nobody holds it, it was not touched since the
    /// hand passed, and it has no laps left.
    pub(crate) fn is_cold(self) -> bool {
        self.is_free() && self.cool() && self.heat() == 0
    }

    #[inline]
    pub(crate) fn heat(self) -> u8 {
        ((self.0 & HEAT_MASK) >> HEAT_SHIFT) as u8
    }

    /// When the page was evicted, on the eviction clock (1 to [`STAMPS`]); 0 for never.
    #[inline]
    pub(crate) fn stamp(self) -> u64 {
        (self.0 & STAMP_MASK) >> STAMP_SHIFT
    }

    #[inline]
    pub(crate) fn version(self) -> u64 {
        self.0 & VERSION_MASK
    }

    /// True if the word says nothing but that the page is absent, when it was evicted, and its version.
    pub(crate) fn is_droppable(self) -> bool {
        self.is_absent() && !self.is_unused()
    }

    /// The version after all of these words', which began with the version `first`.
    pub(crate) fn version_after(first: u64, words: impl Iterator<Item = LatchWord>) -> u64 {
        let passed = words.map(|word| word.version().wrapping_sub(first) & VERSION_MASK).max();
        (first + passed.unwrap_or(0) + 1) & VERSION_MASK
    }

    /// True if the page is not allocated.
    #[inline]
    pub(crate) fn is_unused(self) -> bool {
        self.is_absent() && self.heat() == HEAT_UNUSED
    }

    /// The same, also of a page that somebody has locked for a moment; of one that is not resident.
    pub(crate) fn is_unused_when_locked(self) -> bool {
        self.heat() == HEAT_UNUSED
    }

    #[inline]
    fn with_latch(self, latch: u64) -> LatchWord {
        LatchWord(self.0 & !LATCH_MASK | latch << LATCH_SHIFT).derived()
    }

    #[inline]
    fn with(self, flag: u64, on: bool) -> LatchWord {
        LatchWord(if on { self.0 | flag } else { self.0 & !flag }).derived()
    }

    /// Invariant 4.
    #[inline]
    fn derived(self) -> LatchWord {
        let ready = self.is_readable() && !self.cool();
        LatchWord(if ready { self.0 | READY } else { self.0 & !READY })
    }

    #[inline]
    fn with_heat(self, heat: u8) -> LatchWord {
        strict_assert!(heat <= HEAT_MAX, "heat {heat}");
        LatchWord(self.0 & !HEAT_MASK | u64::from(heat) << HEAT_SHIFT)
    }

    #[inline]
    fn with_stamp(self, stamp: u64) -> LatchWord {
        strict_assert!(stamp <= STAMPS, "stamp {stamp}");
        LatchWord(self.0 & !STAMP_MASK | stamp << STAMP_SHIFT)
    }

    #[inline]
    fn changed(self) -> LatchWord {
        LatchWord(self.0 & !VERSION_MASK | (self.0 + 1) & VERSION_MASK)
    }
}

impl fmt::Debug for LatchWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} v{} heat {}", self.holder(), self.version(), self.heat())?;
        for (flag, name) in [(DIRTY, "dirty"), (WRITING, "writing"), (COOL, "cool")] {
            if self.0 & flag != 0 {
                write!(f, " {name}")?;
            }
        }
        Ok(())
    }
}

/// In a note: the holder changed the content. Words of free pages do not have this bit of the latch.
const CHANGED: u64 = 1 << 62;

/// Part of its page's word that a guard keeps: for an exclusive holder, what the word becomes again. No other thread changes the word meanwhile, and reading it again would wait for
/// the processor to be done with locking it (`book/src/design/pool.md`, hits).
#[derive(Clone, Copy)]
pub(crate) struct HeldWord(u64);

impl HeldWord {
    /// Of a page that was free and ready when it was locked, or that is held with others.
    #[inline]
    pub(crate) fn seen(seen: LatchWord) -> HeldWord {
        HeldWord(seen.0 & !CHANGED)
    }

    /// Of a page that is locked.
    #[inline]
    pub(crate) fn locked(word: LatchWord) -> HeldWord {
        HeldWord(word.with_latch(FREE).0)
    }

    /// The same, of a page whose content was changed.
    #[inline]
    pub(crate) fn changed(self) -> HeldWord {
        HeldWord(self.0 | CHANGED)
    }

    #[inline]
    pub(crate) fn is_changed(self) -> bool {
        self.0 & CHANGED != 0
    }
}

/// The word of one page. Methods named `try_` take the word as last seen and fail when it is
/// another by now; the others are for the page's holder.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Latch(AtomicU64);
// SAFETY: transparent over an atomic integer, for which zero is valid; zero is `Absent`.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for Latch {}
#[cfg(not(loom))]
const _: () = assert!(size_of::<Latch>() == 8);

impl Latch {
    #[cfg(any(test, loom))]
    pub(super) fn absent() -> Latch {
        Latch(AtomicU64::new(0))
    }

    /// Gives a word that is zero, and that nobody changes meanwhile, its first version.
    pub(crate) fn begin_at(&self, version: u64) {
        strict_assert!(self.0.load(Ordering::Relaxed) == 0, "began as {:?}", self.load());
        self.0.store(version & VERSION_MASK, Ordering::Relaxed);
    }

    /// The word when its memory is given back.
    #[cfg(loom)]
    pub(crate) fn given_back(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The word now.
    #[inline]
    pub(crate) fn load(&self) -> LatchWord {
        // Pairs with the release of `unlock` and `loaded`: the content is visible.
        LatchWord(self.0.load(Ordering::Acquire))
    }

    /// True if nothing changed since `seen`, which was readable: see invariant 1.
    #[inline]
    pub(crate) fn is_unchanged(&self, seen: LatchWord) -> bool {
        // Keeps the reads of the content before the load; pairs with the fence in `entered`.
        fence(Ordering::Acquire);
        // Mostly the word is the same altogether.
        self.0.load(Ordering::Relaxed) == seen.0 || self.is_same_content(seen)
    }

    #[cold]
    fn is_same_content(&self, seen: LatchWord) -> bool {
        let now = LatchWord(self.0.load(Ordering::Relaxed));
        now.is_readable() && now.version() == seen.version()
    }

    #[inline]
    fn swap(&self, from: LatchWord, to: LatchWord) -> bool {
        self.0.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// After entering `Locked`: changes of the content stay behind the change of the word, so
    /// that a reader that saw one of them also sees the word changed.
    #[inline]
    fn entered(&self, done: bool) -> bool {
        if done {
            fence(Ordering::Release);
        }
        done
    }

    /// One shared holder more; the page is touched.
    #[inline]
    pub(crate) fn try_share(&self, seen: LatchWord) -> bool {
        let latch = seen.latch();
        if latch == ABSENT || latch > SHARED_MAX {
            return false;
        }
        self.swap(seen, seen.with_latch(latch + 1).with(COOL, false))
    }

    /// As [`try_share`](Self::try_share), if the page is ready: as few instructions as can be.
    #[inline]
    pub(crate) fn try_share_ready(&self, seen: LatchWord) -> bool {
        // One signed comparison: words that are ready are negative, in the order of their latches.
        let is_free = (seen.0 as i64) < (READY | (SHARED_MAX + 1) << LATCH_SHIFT) as i64;
        // The count lies above all else but `ready`, which stays: one more is an addition.
        is_free && self.swap(seen, LatchWord(seen.0 + (1 << LATCH_SHIFT)))
    }

    /// As [`try_lock`](Self::try_lock), if the page is ready: as few instructions as can be.
    #[inline]
    pub(crate) fn try_lock_ready(&self, seen: LatchWord) -> bool {
        let is_ready = seen.0 >> LATCH_SHIFT == READY >> LATCH_SHIFT | FREE;
        let locked = LatchWord(seen.0 ^ (READY | (FREE ^ LOCKED) << LATCH_SHIFT));
        is_ready && self.entered(self.swap(seen, locked))
    }

    /// One shared holder less.
    #[inline]
    pub(crate) fn unshare(&self) {
        // Release: the holder's reads are over before another thread locks the page.
        let before = LatchWord(self.0.fetch_sub(1 << LATCH_SHIFT, Ordering::Release));
        strict_assert!(matches!(before.holder(), Holder::Shared(_)), "unshare of {before:?}");
    }

    /// Locks a free page; it is touched.
    #[inline]
    pub(crate) fn try_lock(&self, seen: LatchWord) -> bool {
        seen.is_free() && self.entered(self.swap(seen, seen.with_latch(LOCKED).with(COOL, false)))
    }

    /// Locks a free page in order to evict it.
    pub(crate) fn try_lock_victim(&self, seen: LatchWord) -> bool {
        seen.is_free() && self.entered(self.swap(seen, seen.with_latch(LOCKED)))
    }

    /// The only shared holder becomes the exclusive one.
    #[inline]
    pub(crate) fn try_upgrade(&self, seen: LatchWord) -> bool {
        seen.holder() == Holder::Shared(1) && self.entered(self.swap(seen, seen.with_latch(LOCKED)))
    }

    /// Notes a touch of a cool page, for optimistic readers.
    pub(crate) fn try_touch(&self, seen: LatchWord) -> bool {
        seen.is_readable() && self.swap(seen, seen.with(COOL, false))
    }

    /// Locks an absent page in order to bring it in.
    pub(crate) fn try_begin_load(&self, seen: LatchWord) -> bool {
        seen.is_absent() && self.entered(self.swap(seen, seen.with_latch(LOCKED)))
    }

    fn locked(&self) -> LatchWord {
        let word = LatchWord(self.0.load(Ordering::Relaxed));
        assert!(word.holder() == Holder::Locked, "not locked: {word:?}");
        word
    }

    /// The holder filled the page; it stays locked.
    pub(crate) fn loaded(&self, cool: bool, heat: u8) {
        let word = self.locked().with(COOL, cool).with(DIRTY, false);
        let word = word.with_heat(heat).with_stamp(0).changed();
        self.0.store(word.0, Ordering::Release);
    }

    /// The holder did not fill the page: it is absent as before.
    pub(crate) fn abort_load(&self) {
        self.0.store(self.locked().changed().with_latch(ABSENT).0, Ordering::Release);
    }

    /// The holder moved the content away and back: the page is free again, as dirty as before,
    /// and a reader that looked at it meanwhile fails to validate.
    pub(crate) fn returned(&self) {
        self.0.store(self.locked().changed().with_latch(FREE).0, Ordering::Release);
    }

    /// The holder lets go; `changed` says whether it changed the content.
    #[inline]
    pub(crate) fn unlock(&self, changed: bool) {
        self.release(FREE, changed);
    }

    /// As [`unlock`](Self::unlock), for a holder that noted the word.
    #[inline]
    pub(crate) fn let_go(&self, note: HeldWord) {
        strict_assert!(self.locked().with_latch(FREE).0 == note.0 & !CHANGED, "{:?}", self.load());
        let mut word = LatchWord(note.0);
        if note.is_changed() {
            word = LatchWord(LatchWord(note.0 ^ CHANGED).changed().0 | DIRTY);
        }
        // Pairs with the acquire of the next holder or reader: it sees the content.
        self.0.store(word.0, Ordering::Release);
    }

    /// The holder becomes the only shared one.
    #[inline]
    pub(crate) fn downgrade(&self, changed: bool) {
        self.release(FREE + 1, changed);
    }

    #[inline]
    fn release(&self, latch: u64, changed: bool) {
        let mut word = LatchWord(self.0.load(Ordering::Relaxed));
        strict_assert!(word.holder() == Holder::Locked, "release of {word:?}");
        if changed {
            word = LatchWord(word.changed().0 | DIRTY);
        }
        // Invariant 4 without a branch: `ready` is what `cool` is not.
        let ready = !word.0 << COOL.leading_zeros() & READY;
        let released = LatchWord((word.0 - ((LOCKED - latch) << LATCH_SHIFT)) | ready);
        strict_assert!(released == word.with_latch(latch), "{released:?} from {word:?}");
        // Pairs with the acquire of the next holder or reader: it sees the content.
        self.0.store(released.0, Ordering::Release);
    }

    /// The holder dropped the page's memory.
    pub(crate) fn evicted(&self, stamp: u64) {
        let kept = LatchWord(self.locked().version()).changed();
        self.0.store(kept.with_latch(ABSENT).with_stamp(stamp).0, Ordering::Release);
    }

    /// The holder dropped the page's memory, if it had some, and the page is not allocated any more.
    pub(crate) fn freed(&self) {
        let kept = LatchWord(self.locked().version()).changed();
        self.0.store(kept.with_latch(ABSENT).with_heat(HEAT_UNUSED).0, Ordering::Release);
    }

    /// Marks a page that is not in use yet as not allocated.
    pub(crate) fn mark_unused(&self) {
        let word = self.load();
        assert!(word.is_absent(), "{word:?}");
        self.0.store(word.with_heat(HEAT_UNUSED).0, Ordering::Release);
    }

    /// The hand passes: the page is cool from now on, with this heat left.
    pub(crate) fn try_cool(&self, seen: LatchWord, heat: u8) -> bool {
        seen.is_readable() && self.swap(seen, seen.with(COOL, true).with_heat(heat))
    }

    /// One shared holder more, the only one that writes the page back. No touch.
    pub(crate) fn try_begin_write(&self, seen: LatchWord) -> bool {
        let latch = seen.latch();
        if !seen.is_readable() || latch > SHARED_MAX || !seen.dirty() || seen.writing() {
            return false;
        }
        self.swap(seen, seen.with_latch(latch + 1).with(WRITING, true))
    }

    /// One shared holder more, that only wants the content to stay as it is and is no fix: as for a
    /// write, which does not begin meanwhile. Ends by [`end_write`](Self::end_write). No touch.
    pub(crate) fn try_hold_still(&self, seen: LatchWord) -> bool {
        let latch = seen.latch();
        let is_open = seen.is_readable() && latch <= SHARED_MAX && !seen.dirty() && !seen.writing();
        is_open && self.swap(seen, seen.with_latch(latch + 1).with(WRITING, true))
    }

    /// The writer is done; `written` says whether the device has the content now.
    pub(crate) fn end_write(&self, written: bool) {
        let gone = if written { DIRTY | WRITING } else { WRITING };
        let before = LatchWord(self.0.fetch_and(!gone, Ordering::Release));
        strict_assert!(before.writing(), "end of write of {before:?}");
        self.unshare();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn present() -> Latch {
        let latch = Latch::absent();
        assert!(latch.try_begin_load(latch.load()));
        latch.loaded(false, 0);
        latch.unlock(false);
        latch
    }

    #[test]
    fn shared_holders_count_up_to_their_bound() {
        let latch = present();
        for _ in 0..SHARED_MAX {
            assert!(latch.try_share(latch.load()));
        }
        assert!(!latch.try_share(latch.load()));
        assert!(!latch.try_lock(latch.load()));
        for _ in 0..SHARED_MAX {
            latch.unshare();
        }
        assert!(latch.load().is_free());
    }

    #[test]
    fn the_short_ways_do_what_the_long_ones_do_and_only_to_ready_pages() {
        let (short, long) = (present(), present());
        for _ in 0..SHARED_MAX {
            assert!(short.try_share_ready(short.load()) && long.try_share(long.load()));
            assert_eq!(short.load(), long.load());
        }
        assert!(!short.try_share_ready(short.load()));
        assert!(!short.try_lock_ready(short.load()));
        (0..SHARED_MAX).for_each(|_| short.unshare());
        (0..SHARED_MAX).for_each(|_| long.unshare());
        assert!(short.try_lock_ready(short.load()) && long.try_lock(long.load()));
        assert_eq!(short.load(), long.load());
        assert!(!short.try_lock_ready(short.load()) && !short.try_share_ready(short.load()));
        short.unlock(true);
        assert!(short.try_cool(short.load(), 0));
        assert!(!short.try_lock_ready(short.load()) && !short.try_share_ready(short.load()));
        assert!(!Latch::absent().try_lock_ready(LatchWord(0)));
        assert!(!Latch::absent().try_share_ready(LatchWord(0)));
    }

    #[test]
    fn letting_go_by_a_note_does_what_unlocking_does() {
        let (noted, plain) = (present(), present());
        let let_go = |note: HeldWord, changed: bool| {
            noted.let_go(if changed { note.changed().changed() } else { note });
            plain.unlock(changed);
            assert_eq!(noted.load(), plain.load());
        };
        for changed in [false, true, false] {
            assert!(noted.try_cool(noted.load(), 1) && plain.try_cool(plain.load(), 1));
            assert!(noted.try_lock(noted.load()) && plain.try_lock(plain.load()));
            let_go(HeldWord::locked(noted.load()), changed);
            let seen = noted.load();
            assert!(noted.try_lock_ready(seen) && plain.try_lock(plain.load()));
            let_go(HeldWord::seen(seen), changed);
            assert!(noted.try_lock_victim(noted.load()) && plain.try_lock_victim(plain.load()));
            noted.evicted(7);
            plain.evicted(7);
            assert!(noted.try_begin_load(noted.load()) && plain.try_begin_load(plain.load()));
            noted.loaded(true, 2);
            plain.loaded(true, 2);
            let_go(HeldWord::locked(noted.load()), changed);
            assert!(noted.try_share(noted.load()) && plain.try_share(plain.load()));
            let seen = noted.load();
            assert!(noted.try_upgrade(seen) && plain.try_upgrade(plain.load()));
            let_go(HeldWord::locked(seen), changed);
        }
    }

    #[test]
    fn a_page_is_ready_when_it_is_readable_and_was_touched() {
        let latch = Latch::absent();
        let mut seen = Vec::new();
        let mut look = |latch: &Latch| seen.push(latch.load().is_ready());
        look(&latch);
        assert!(latch.try_begin_load(latch.load()));
        latch.loaded(true, 0);
        look(&latch);
        latch.unlock(false);
        look(&latch);
        assert!(latch.try_touch(latch.load()));
        look(&latch);
        assert!(latch.try_cool(latch.load(), 0) && latch.try_share(latch.load()));
        look(&latch);
        assert!(latch.try_upgrade(latch.load()));
        look(&latch);
        latch.downgrade(true);
        latch.unshare();
        look(&latch);
        assert!(latch.try_cool(latch.load(), 0) && latch.try_begin_write(latch.load()));
        latch.end_write(true);
        look(&latch);
        assert!(latch.try_lock_victim(latch.load()));
        latch.evicted(3);
        look(&latch);
        assert_eq!(seen, [false, false, false, true, true, false, true, false, false]);
    }

    #[test]
    fn a_change_and_an_eviction_fail_validation_and_a_read_lock_does_not() {
        let latch = present();
        let seen = latch.load();
        assert!(latch.try_lock(latch.load()));
        assert!(!latch.is_unchanged(seen));
        latch.unlock(false);
        assert!(latch.is_unchanged(seen));
        assert!(latch.try_lock(latch.load()));
        latch.unlock(true);
        assert!(!latch.is_unchanged(seen));
        let seen = latch.load();
        assert!(latch.try_lock_victim(seen));
        latch.evicted(7);
        assert!(!latch.is_unchanged(seen));
        assert_eq!(latch.load().stamp(), 7);
    }

    #[test]
    fn a_page_that_was_freed_is_not_allocated_and_one_that_was_evicted_is() {
        let latch = present();
        assert!(latch.try_lock(latch.load()));
        latch.evicted(1);
        assert!(!latch.load().is_unused() && latch.load().is_droppable());
        assert!(latch.try_begin_load(latch.load()));
        latch.abort_load();
        assert!(!latch.load().is_unused());
        assert!(latch.try_begin_load(latch.load()));
        latch.freed();
        assert!(latch.load().is_unused() && !latch.load().is_droppable());
    }

    #[test]
    fn only_one_writer_at_a_time_and_a_failed_write_leaves_the_page_dirty() {
        let latch = present();
        assert!(latch.try_lock(latch.load()));
        latch.unlock(true);
        assert!(latch.try_begin_write(latch.load()));
        assert!(!latch.try_begin_write(latch.load()));
        latch.end_write(false);
        assert!(latch.load().dirty() && latch.load().is_free());
        assert!(latch.try_begin_write(latch.load()));
        latch.end_write(true);
        assert!(!latch.load().dirty());
    }

    #[test]
    fn a_touch_warms_a_cool_page_and_only_the_single_holder_upgrades() {
        let latch = present();
        assert!(latch.load().is_idle());
        assert!(latch.try_cool(latch.load(), 2));
        assert!(latch.load().cool() && latch.load().heat() == 2 && !latch.load().is_idle());
        assert!(latch.try_share(latch.load()));
        assert!(!latch.load().cool());
        assert!(latch.try_share(latch.load()));
        assert!(!latch.try_upgrade(latch.load()));
        latch.unshare();
        assert!(latch.try_upgrade(latch.load()));
        latch.downgrade(true);
        latch.unshare();
        assert!(latch.try_cool(latch.load(), 0));
        assert!(latch.load().dirty() && !latch.load().is_idle());
        assert!(!Latch::absent().load().is_idle());
    }
}

// By its path: under loom this file is a module of the crate's root.
#[cfg(all(test, loom))]
#[path = "latch/models.rs"]
mod models;
