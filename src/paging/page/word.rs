//! The page word: everything the pager knows about one page, in 64 bits.
//!
//! ```text
//!  63..60 state | 59 protected | 58 dead | 57 unused | 56 prefetched | 55..48 pins |
//!  47 wanted | 46 guessed | 45..0 payload
//!
//!          fault: zeros              evict
//!   Empty ------------> Moving <-----------------> Resident
//!     ^                  ^ | |  kept, installed
//!     | discard    read  | | | unmapped   refault: back
//!     | (any state) done | | +-----------> Cooling ---------> Moving
//!     |                  | |                |   | dirty
//!     |   fault          | | clean,         |   v       refault: copied out
//!   Stored ---------> Filling  protected    | Writing ------> Moving
//!     ^  ^               | |                |   |
//!     |  +---------------|-+  clean (hash)  |   | written
//!     +------------------|------------------+---+
//!                        +--> Poisoned (read failed)
//! ```
//! | state | memory | payload | who may leave it |
//! |---|---|---|---|
//! | `Empty` | none; reads as zero | - | a handler |
//! | `Filling` | a staging frame being read into | frame | the handler that entered it, or who revoked its read (`page::frame_meta`); discard marks it dead |
//! | `Moving` | the mapping is being changed: microseconds, no I/O | slot or none | the thread that entered it |
//! | `Resident` | mapped in the region | slot or none | evictor, discard; a handler clears `protected` |
//! | `Cooling` | in a staging frame | frame | a handler (back), discard, the evictor |
//! | `Writing` | in a staging frame being written | frame | the evictor (who may try `Moving` and come back); a handler copies out; discard |
//! | `Stored` | on the device only | slot | a handler, discard |
//! | `Poisoned` | lost; a touch is SIGBUS | slot or none | discard (by way of `Moving`) |
//!
//! `protected`: the mapping is write-protected and the content is the slot's; a write faults
//! first. `dead`: discarded while being read; who finishes the read makes the page `Empty`.
//! `wanted`: a fault waits for the read, and the thread that ends it wakes. `guessed`: mapped writable for
//! a read, because pages here are mostly written.
//! `prefetched`: nobody asked for
//! the page by a fault yet. `pins`: the page must not be evicted while it is not zero.

#![expect(unsafe_code, reason = "an atomic word is valid when zero")]

use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::SlotId;
use std::fmt;

/// State of a page, as drawn in the module's docs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Empty = 0,
    Filling = 1,
    Resident = 2,
    Moving = 3,
    Cooling = 4,
    Writing = 5,
    Stored = 6,
    Poisoned = 7,
}

const STATE_SHIFT: u32 = 60;
const PROTECTED: u64 = 1 << 59;
const DEAD: u64 = 1 << 58;
const PREFETCHED: u64 = 1 << 56;
const PIN_SHIFT: u32 = 48;
const PIN_MASK: u64 = 0xFF << PIN_SHIFT;
const WANTED: u64 = 1 << 47;
const GUESSED: u64 = 1 << 46;
const PAYLOAD_MASK: u64 = (1 << 46) - 1;

/// Maximum number of pins of one page.
pub(crate) const PINS_MAX: u64 = 0xFF;

/// A staging frame: its index in the staging area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FrameId(pub(crate) u32);

/// A value of a page word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    /// Reads as zero, costs nothing.
    pub(crate) const EMPTY: Word = Word(0);

    const fn with(state: State, payload: u64) -> Word {
        Word((state as u64) << STATE_SHIFT | payload)
    }

    pub(crate) fn state(self) -> State {
        match self.0 >> STATE_SHIFT {
            0 => State::Empty,
            1 => State::Filling,
            2 => State::Resident,
            3 => State::Moving,
            4 => State::Cooling,
            5 => State::Writing,
            6 => State::Stored,
            7 => State::Poisoned,
            other => unreachable!("page word state {other}"),
        }
    }

    /// The page's slot is being read into `frame`.
    pub(crate) fn filling(frame: FrameId) -> Word {
        Word::with(State::Filling, u64::from(frame.0) + 1)
    }

    /// The page's mapping is being changed by the thread that says so.
    pub(crate) fn moving(slot: Option<SlotId>) -> Word {
        Word::with(State::Moving, encode_slot(slot))
    }

    /// The page is mapped; `slot` holds an older or equal copy.
    pub(crate) fn resident(slot: Option<SlotId>) -> Word {
        Word::with(State::Resident, encode_slot(slot))
    }

    /// The page's data is in a staging frame.
    pub(crate) fn cooling(frame: FrameId) -> Word {
        Word::with(State::Cooling, u64::from(frame.0) + 1)
    }

    /// The page's data is being written from a staging frame.
    pub(crate) fn writing(frame: FrameId) -> Word {
        Word::with(State::Writing, u64::from(frame.0) + 1)
    }

    /// The page's data is in a slot and nowhere else.
    pub(crate) fn stored(slot: SlotId) -> Word {
        Word::with(State::Stored, encode_slot(Some(slot)))
    }

    /// The page's data is lost.
    pub(crate) fn poisoned(slot: Option<SlotId>) -> Word {
        Word::with(State::Poisoned, encode_slot(slot))
    }

    /// The same page with its mapping being changed: slot and flags stay.
    pub(crate) fn leaving(self) -> Word {
        strict_assert!(self.state() == State::Resident, "{self:?} cannot leave");
        Word(self.0 & !(0xF << STATE_SHIFT) | (State::Moving as u64) << STATE_SHIFT)
    }

    /// The same page mapped after all: slot and flags stay.
    pub(crate) fn kept(self) -> Word {
        strict_assert!(self.state() == State::Moving, "{self:?} is not being moved");
        Word(self.0 & !(0xF << STATE_SHIFT) | (State::Resident as u64) << STATE_SHIFT)
    }

    pub(crate) fn protected(self) -> bool {
        self.0 & PROTECTED != 0
    }

    pub(crate) fn with_protected(self, on: bool) -> Word {
        self.with_flag(PROTECTED, on)
    }

    pub(crate) fn dead(self) -> bool {
        self.0 & DEAD != 0
    }

    pub(crate) fn with_dead(self) -> Word {
        self.with_flag(DEAD, true)
    }

    pub(crate) fn wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    pub(crate) fn with_wanted(self, on: bool) -> Word {
        strict_assert!(self.state() == State::Filling, "{self:?} is not being read");
        self.with_flag(WANTED, on)
    }

    pub(crate) fn prefetched(self) -> bool {
        self.0 & PREFETCHED != 0
    }

    pub(crate) fn with_prefetched(self, on: bool) -> Word {
        self.with_flag(PREFETCHED, on)
    }

    pub(crate) fn guessed(self) -> bool {
        self.0 & GUESSED != 0
    }

    pub(crate) fn with_guessed(self, on: bool) -> Word {
        self.with_flag(GUESSED, on)
    }

    fn with_flag(self, flag: u64, on: bool) -> Word {
        Word(if on { self.0 | flag } else { self.0 & !flag })
    }

    pub(crate) fn pins(self) -> u64 {
        (self.0 & PIN_MASK) >> PIN_SHIFT
    }

    /// One pin more; `None` when the count is at [`PINS_MAX`].
    pub(crate) fn pinned(self) -> Option<Word> {
        strict_assert!(self.state() == State::Resident, "{self:?} cannot be pinned");
        (self.pins() < PINS_MAX).then(|| Word(self.0 + (1 << PIN_SHIFT)))
    }

    /// One pin less; `None` when there is none.
    pub(crate) fn unpinned(self) -> Option<Word> {
        (self.pins() > 0).then(|| Word(self.0 - (1 << PIN_SHIFT)))
    }

    /// The slot of a page in a state that has one.
    pub(crate) fn slot(self) -> Option<SlotId> {
        strict_assert!(
            matches!(
                self.state(),
                State::Resident | State::Moving | State::Stored | State::Poisoned
            ),
            "{self:?} has no slot"
        );
        (self.0 & PAYLOAD_MASK).checked_sub(1).map(SlotId)
    }

    /// True if the page's slot is being read into `frame`.
    pub(crate) fn is_filling(self, frame: FrameId) -> bool {
        self.state() == State::Filling && self.frame() == Some(frame)
    }

    /// The staging frame of a page in a state that has one.
    pub(crate) fn frame(self) -> Option<FrameId> {
        strict_assert!(
            matches!(self.state(), State::Filling | State::Cooling | State::Writing),
            "{self:?} has no frame"
        );
        (self.0 & PAYLOAD_MASK).checked_sub(1).map(|frame| FrameId(frame as u32))
    }
}

fn encode_slot(slot: Option<SlotId>) -> u64 {
    let payload = slot.map_or(0, |slot| slot.0 + 1);
    assert!(payload <= PAYLOAD_MASK, "slot number {payload} does not fit into a page word");
    payload
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({})", self.state(), self.0 & PAYLOAD_MASK)?;
        for (flag, name) in [
            (PROTECTED, "protected"),
            (DEAD, "dead"),
            (PREFETCHED, "prefetched"),
            (WANTED, "wanted"),
            (GUESSED, "guessed"),
        ] {
            if self.0 & flag != 0 {
                write!(f, " {name}")?;
            }
        }
        if self.pins() > 0 {
            write!(f, " pins={}", self.pins())?;
        }
        Ok(())
    }
}

/// The word of one page, shared by handlers, evictors and threads that discard.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct PageWord(AtomicU64);
// SAFETY: transparent over an atomic integer, for which zero is valid; zero is `Empty`.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for PageWord {}
#[cfg(not(loom))]
const _: () = assert!(size_of::<PageWord>() == 8);

impl PageWord {
    /// The word now.
    pub(crate) fn load(&self) -> Word {
        // Pairs with the release in `try_change`: a thread that sees a state sees what was done before
        // it was entered (the slot's checksum, the frame's bytes).
        Word(self.0.load(Ordering::Acquire))
    }

    /// Moves the page from exactly `from` to `to`; fails with what it is instead.
    pub(crate) fn try_change(&self, from: Word, to: Word) -> Result<(), Word> {
        strict_assert!(legal(from, to), "page word {from:?} -> {to:?}");
        self.0
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(Word)
    }
}

/// True if the protocol has the transition; see the module's drawing.
fn legal(from: Word, to: Word) -> bool {
    use State::{Cooling, Empty, Filling, Moving, Poisoned, Resident, Stored, Writing};
    match (from.state(), to.state()) {
        (Filling, Filling) => {
            to == from.with_flag(DEAD, true) && !from.dead()
                || to == from.with_wanted(true) && !from.dead() && !from.wanted()
        }
        (Empty, Moving)
        | (Filling, Moving | Empty | Stored | Poisoned)
        | (Moving, Resident | Cooling | Writing | Stored | Empty | Poisoned)
        | (Resident, Resident | Moving)
        | (Cooling, Moving | Writing | Stored | Empty)
        | (Writing, Moving | Stored | Empty)
        | (Stored, Filling | Moving | Empty)
        | (Poisoned, Moving) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::ExpectedPanic;

    #[test]
    fn a_word_keeps_slot_and_flags_through_eviction_and_back() {
        let word = Word::resident(Some(SlotId(41))).with_protected(true);
        let back = word.leaving().kept();
        assert_eq!(back, word);
        assert_eq!(back.slot(), Some(SlotId(41)));
        assert!(back.protected() && !back.dead());
    }

    #[test]
    fn pins_count_up_to_their_bound_and_leave_the_rest_alone() {
        let mut word = Word::resident(Some(SlotId(PAYLOAD_MASK - 1)));
        for _ in 0..PINS_MAX {
            word = word.pinned().expect("below the bound");
        }
        assert_eq!(word.pinned(), None);
        assert_eq!(word.slot(), Some(SlotId(PAYLOAD_MASK - 1)));
        for _ in 0..PINS_MAX {
            word = word.unpinned().expect("was pinned");
        }
        assert_eq!(word.unpinned(), None);
    }

    #[test]
    fn a_change_from_a_stale_word_fails_with_the_present_one() {
        let page = PageWord::default();
        page.try_change(Word::EMPTY, Word::moving(None)).expect("fresh page");
        let seen = page.try_change(Word::EMPTY, Word::moving(None)).expect_err("no longer empty");
        assert_eq!(seen, Word::moving(None));
    }

    #[test]
    #[should_panic(expected = "page word")]
    fn a_transition_outside_of_the_protocol_is_refused() {
        let _expected = ExpectedPanic::saying("page word");
        let page = PageWord::default();
        let _ = page.try_change(Word::EMPTY, Word::stored(SlotId(1)));
    }
}
