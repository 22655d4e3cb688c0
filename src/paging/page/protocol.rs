//! The protocol of the page word: who wins a page, and what the winner owns and owes.
//!
//! Where several threads want a page, they change its word only as these functions do.
//! Each tries one change and says what came of it; mapping, reading, writing and freeing are the
//! caller's. That keeps what must be right under every interleaving in one place, which the model
//! in `models.rs` runs through all of them.
//!
//! ```text
//!                 frame            old slot (metadata)    new slot
//!  filled         handler           the page's         -
//!  revoked        reader, later    reader, later      -            (then `filled` by the revoker)
//!  take_back      taker, decides   taker: the page's  -
//!  copy_out       taker, decides   evictor frees      evictor frees, when outcome is decided
//!  discard        taker, decides   taker frees        -            (Cooling)
//!  discard        caller, decides  evictor frees      evictor frees, when outcome is decided (Writing)
//!  cooled: Clean  evictor          the page's         -
//!  cooled: Zero   evictor          evictor frees      -
//!  written        evictor          evictor frees      the page's
//!  unwritten      evictor          the page's         evictor frees
//!  rescue         evictor, decides the page's         evictor frees, when the device lets go
//! ```

use crate::base::units::SlotId;
use crate::paging::page::frame_meta::{FrameMeta, FrameOutcome};
use crate::paging::page::word::{FrameId, PageWord, State, Word};

/// A handler takes a `Cooling` page's content back. Won: the page is `Moving` without a slot in its
/// word, and the slot that it has is returned.
pub(crate) fn take_back(
    word: &PageWord,
    seen: Word,
    note: &FrameMeta,
) -> Result<Option<SlotId>, Word> {
    word.try_change(seen, Word::moving(None))?;
    // Not before the change: frame metadata, invariant 2.
    Ok(note.slot())
}

/// A write found a page protected. Won: the page is `Moving`, the first word; lift the protection,
/// then make it the second. Not before: a page that is anybody's may leave and be read again, and
/// the protection that is lifted late is one that a word counts on. (Where pages leave by copy the
/// evictor protects them, too.)
pub(crate) fn open_for_writes(word: &PageWord, seen: Word) -> Result<(Word, Word), Word> {
    let moving = seen.leaving();
    word.try_change(seen, moving)?;
    let opened = match seen.protected() {
        true => seen.with_protected(false).with_prefetched(false),
        false => seen,
    };
    Ok((moving, opened))
}

/// A handler copies the content of a page that is being written. Won: the page is `Moving`; its old
/// slot and the one being written are the evictor's to free.
pub(crate) fn copy_out(word: &PageWord, seen: Word) -> Result<(), Word> {
    word.try_change(seen, Word::moving(None))
}

/// Outcome of a fill whose read is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// The page is `Moving`; install the frame. With `wanted` somebody waits for it: wake.
    Moving { moving: Word, wanted: bool },
    /// Discarded meanwhile: free slot and frame, make the page of this word `Empty`, wake.
    Died(Word),
}

/// A handler's read into `frame`, of `slot`, is over.
///
/// Without `wanted` nobody needs to be woken: a thread that has faulted has been seen by a handler
/// or will be. One that was seen while the page was `Filling` left its mark; one seen later finds
/// the page `Moving`, which it looks at again, or mapped, and is woken by the handler that sees it.
pub(crate) fn filled(word: &PageWord, frame: FrameId, slot: Option<SlotId>) -> Filled {
    let moving = Word::moving(slot);
    let mut filling = Word::filling(frame);
    loop {
        match word.try_change(filling, moving) {
            Ok(()) => return Filled::Moving { moving, wanted: filling.wanted() },
            Err(now) if now == filling.with_wanted(true) && !filling.wanted() => filling = now,
            Err(now) => return Filled::Died(expect_dead(now, filling)),
        }
    }
}

/// A fault waits for a page that is being read. `false`: the page changed, look again.
pub(crate) fn want(word: &PageWord, filling: Word) -> bool {
    filling.wanted() || word.try_change(filling, filling.with_wanted(true)).is_ok()
}

/// Outcome of discarding one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Discard {
    /// Nothing is left to do: the page is empty, or who finishes its I/O makes it so.
    Done,
    /// The page is empty; its slot is the caller's to free.
    Freed(Option<SlotId>),
    /// The page is empty; free the slot, then decide the frame's outcome.
    Dropped(FrameId, Option<SlotId>),
    /// The page is empty and was being written: decide the frame's outcome; the evictor frees the
    /// slots, and the frame once the device has let go of it.
    Abandoned(FrameId),
    /// The page was poisoned and is `Moving` without a slot: free the slot, mend the mapping, make
    /// the page `Empty`.
    Mend(Option<SlotId>),
    /// The page is mapped: make it `Moving` and unmap it.
    Mapped(Word),
    /// Another thread changes the page's mapping: a matter of microseconds.
    Busy,
    /// The page changed under the caller's eyes: look again.
    Changed,
}

/// Tries once to discard a page.
pub(crate) fn discard<'a>(
    word: &PageWord,
    notes: impl FnOnce(FrameId) -> &'a FrameMeta,
) -> Discard {
    let seen = word.load();
    let change = |to| word.try_change(seen, to).is_ok();
    match seen.state() {
        State::Empty => Discard::Done,
        State::Resident => Discard::Mapped(seen),
        State::Moving => Discard::Busy,
        State::Filling if seen.dead() => Discard::Done,
        State::Filling if change(seen.with_dead()) => Discard::Done,
        State::Writing if change(Word::EMPTY) => {
            Discard::Abandoned(seen.frame().expect("a page being written has a frame"))
        }
        State::Stored if change(Word::EMPTY) => Discard::Freed(seen.slot()),
        State::Poisoned if change(Word::moving(None)) => Discard::Mend(seen.slot()),
        State::Cooling if change(Word::EMPTY) => {
            let frame = seen.frame().expect("a cooling page has a frame");
            // Not before the change: frame metadata, invariant 2.
            Discard::Dropped(frame, notes(frame).slot())
        }
        _ => Discard::Changed,
    }
}

/// Verdict of the evictor on a cooled page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Equal to the slot.
    Clean(SlotId),
    Zero,
    Dirty,
}

/// The evictor is done with cooling `frame`. `false`: another hand took the page; the frame
/// is borrowed until its outcome is decided.
pub(crate) fn cooled(word: &PageWord, frame: FrameId, content: Content) -> bool {
    let to = match content {
        Content::Clean(slot) => Word::stored(slot),
        Content::Zero => Word::EMPTY,
        Content::Dirty => Word::writing(frame),
    };
    word.try_change(Word::cooling(frame), to).is_ok()
}

/// Outcome of a page's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Nothing: it is what the caller wanted.
    Won,
    /// A handler copied the content out, or it was discarded: free the old slot; frame and new
    /// slot are borrowed.
    Taken,
}

/// The evictor's write of `frame` to `slot` is done.
pub(crate) fn written(word: &PageWord, frame: FrameId, slot: SlotId) -> Written {
    end_write(word, frame, Word::stored(slot))
}

/// The evictor's write of `frame` failed. Won: the page is `Moving`, to be mapped again.
pub(crate) fn unwritten(word: &PageWord, frame: FrameId, old: Option<SlotId>) -> Written {
    end_write(word, frame, Word::moving(old))
}

/// The evictor takes a page whose write does not end. Won: the page is `Moving`; once its memory is
/// back in the region the old slot is the page's, and the one being written counts as for
/// [`copy_out`]. If the memory cannot be moved, [`not_rescued`] makes the page what it was.
pub(crate) fn rescue(word: &PageWord, frame: FrameId) -> bool {
    word.try_change(Word::writing(frame), Word::moving(None)).is_ok()
}

/// The evictor could not move the memory of a page that it meant to rescue.
pub(crate) fn not_rescued(word: &PageWord, frame: FrameId) {
    let back = word.try_change(Word::moving(None), Word::writing(frame));
    assert!(back.is_ok(), "a page became {back:?} while it was being moved");
}

fn end_write(word: &PageWord, frame: FrameId, to: Word) -> Written {
    let writing = Word::writing(frame);
    match word.try_change(writing, to) {
        Ok(()) => Written::Won,
        Err(_) => Written::Taken,
    }
}

/// Next step for a frame that another hand has borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Borrowed {
    /// The taker is still at work.
    Wait,
    /// The taker could not map the page and left it cooling: it is the evictor's again.
    Cooling,
    /// The frame is free; `true`: with its memory.
    Over(bool),
}

/// Looks at a frame that another hand took the page from.
pub(crate) fn look_at_borrowed(word: &PageWord, frame: FrameId, note: &FrameMeta) -> Borrowed {
    match note.outcome() {
        FrameOutcome::MovedBack => Borrowed::Over(false),
        FrameOutcome::Dropped => Borrowed::Over(true),
        FrameOutcome::Open if word.load() == Word::cooling(frame) => Borrowed::Cooling,
        FrameOutcome::Open => Borrowed::Wait,
    }
}

fn expect_dead(now: Word, before: Word) -> Word {
    let wanted = before.with_wanted(true);
    let dead = now == before.with_dead() || now == wanted.with_dead();
    assert!(dead, "{before:?} became {now:?}");
    now
}
