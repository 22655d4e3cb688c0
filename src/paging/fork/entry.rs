//! A child region's record of a page, in 64 bits. Zero: nothing beyond what was inherited.
//!
//! ```text
//!  63 known | 62 out | 61 listed | 60..59 backing: nothing, slot, frame | 58..46 layer | 45..0 number
//! ```

use crate::base::units::SlotId;
use crate::paging::page::word::FrameId;

const KNOWN: u64 = 1 << 63;
const OUT: u64 = 1 << 62;
const LISTED: u64 = 1 << 61;
const KIND_SHIFT: u32 = 59;
const KIND_MASK: u64 = 3 << KIND_SHIFT;
const SLOT: u64 = 1 << KIND_SHIFT;
const FRAME: u64 = 2 << KIND_SHIFT;
const LAYER_SHIFT: u32 = 46;
const LAYER_MAX: u64 = (1 << 13) - 1;
const NUMBER_MASK: u64 = (1 << LAYER_SHIFT) - 1;

/// Where a page's content is, beside memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Nowhere; one that is not in memory reads as zero.
    Nothing,
    /// In a slot, as it was when it was read or written last.
    Slot { layer: u16, slot: SlotId },
    /// In a frame of the parent's.
    Frame(FrameId),
}

/// See [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    /// `None`: what was inherited holds.
    pub(super) fn from_bits(bits: u64) -> Option<Entry> {
        (bits & KNOWN != 0).then_some(Entry(bits))
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// A page that is in memory, as far as it has ever been touched.
    pub(super) fn in_memory(backing: Backing) -> Entry {
        Entry(KNOWN | encode(backing))
    }

    /// A page that is not in memory.
    pub(super) fn out(backing: Backing) -> Entry {
        Entry(KNOWN | OUT | encode(backing))
    }

    pub(super) fn is_out(self) -> bool {
        self.0 & OUT != 0
    }

    /// The same page in memory.
    pub(super) fn came_in(self) -> Entry {
        Entry(self.0 & !OUT)
    }

    /// True if it is on the list of pages that are the process's alone.
    pub(super) fn is_listed(self) -> bool {
        self.0 & LISTED != 0
    }

    pub(super) fn listed(self) -> Entry {
        Entry(self.0 | LISTED)
    }

    pub(super) fn unlisted(self) -> Entry {
        Entry(self.0 & !LISTED)
    }

    pub(super) fn backing(self) -> Backing {
        let number = self.0 & NUMBER_MASK;
        match self.0 & KIND_MASK {
            SLOT => {
                let layer = (self.0 >> LAYER_SHIFT & LAYER_MAX) as u16;
                Backing::Slot { layer, slot: SlotId(number) }
            }
            FRAME => Backing::Frame(FrameId(number as u32)),
            _ => Backing::Nothing,
        }
    }
}

fn encode(backing: Backing) -> u64 {
    match backing {
        Backing::Nothing => 0,
        Backing::Frame(frame) => FRAME | u64::from(frame.0),
        Backing::Slot { layer, slot } => {
            let layer = u64::from(layer);
            assert!(slot.0 <= NUMBER_MASK && layer <= LAYER_MAX, "{slot} of layer {layer}");
            SLOT | layer << LAYER_SHIFT | slot.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_keeps_what_it_was_made_of() {
        let backings = [
            Backing::Nothing,
            Backing::Frame(FrameId(u32::MAX)),
            Backing::Slot { layer: 0, slot: SlotId(0) },
            Backing::Slot { layer: 8191, slot: SlotId(NUMBER_MASK) },
        ];
        for backing in backings {
            for (entry, out) in [(Entry::out(backing), true), (Entry::in_memory(backing), false)] {
                let known = Entry::from_bits(entry.listed().bits()).expect("an entry");
                assert_eq!((known.backing(), known.is_out()), (backing, out));
                assert!(known.is_listed() && !known.unlisted().is_listed());
                assert!(!known.came_in().is_out());
            }
        }
        assert_eq!(Entry::from_bits(0), None, "nothing is known at first");
    }
}
