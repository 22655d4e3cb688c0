//! The slots of a store, or of each of the two that are joined, under one range of numbers.
//!
//! [`SlotMaps`] has a [`SlotMap`] for each side: what is free, ready and to be discarded is a matter of each
//! device. A slot's number says which side it is of, so whatever names a slot knows nothing of sides.

use super::slots::{HoldId, SlotMap};
use super::{Side, Store};
use crate::base::error::Result;
use crate::base::units::{ByteCount, SlotCount, SlotId};
use std::ops::Range;

/// The slots of one store, which may be a joined one.
#[derive(Debug)]
pub(crate) struct SlotMaps {
    first: SlotMap,
    /// The second side's, and the number of its first slot.
    second: Option<(u64, SlotMap)>,
}

impl SlotMaps {
    /// Creates the map of a store's slots of `page` bytes, all of them asleep.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when there is no address space for it.
    pub(crate) fn new(store: &dyn Store, page: ByteCount) -> Result<SlotMaps> {
        let slots = |bytes: u64| SlotMap::new(SlotCount(bytes / page.0));
        let Some(halves) = store.halves() else {
            return Ok(SlotMaps { first: slots(store.capacity().0)?, second: None });
        };
        let second = slots(store.capacity().0 - halves.boundary)?;
        Ok(SlotMaps {
            first: slots(halves.first.0)?,
            second: Some((halves.boundary / page.0, second)),
        })
    }

    /// The sides that there are.
    pub(crate) fn sides(&self) -> impl Iterator<Item = Side> {
        [Some(Side::First), self.second.as_ref().map(|_| Side::Second)].into_iter().flatten()
    }

    /// Whether there are two sides.
    pub(crate) fn are_joined(&self) -> bool {
        self.second.is_some()
    }

    /// The side that a slot is of.
    pub(crate) fn side_of(&self, slot: SlotId) -> Side {
        match &self.second {
            Some((start, _)) if slot.0 >= *start => Side::Second,
            _ => Side::First,
        }
    }

    /// The number of a side's first slot, and its map.
    ///
    /// # Panics
    /// When there is no such side.
    fn side(&self, side: Side) -> (u64, &SlotMap) {
        match side {
            Side::First => (0, &self.first),
            Side::Second => {
                let (start, map) = self.second.as_ref().expect("the store has a second side");
                (*start, map)
            }
        }
    }

    fn sum(&self, count: impl Fn(&SlotMap) -> SlotCount) -> SlotCount {
        SlotCount(count(&self.first).0 + self.second.as_ref().map_or(0, |(_, map)| count(map).0))
    }

    // Of a side; see `SlotMap`.

    /// As [`SlotMap::wake`].
    pub(crate) fn wake(&self, side: Side) -> bool {
        self.side(side).1.wake()
    }

    /// As [`SlotMap::has_asleep`].
    pub(crate) fn has_asleep(&self, side: Side) -> bool {
        self.side(side).1.has_asleep()
    }

    /// As [`SlotMap::awake`].
    pub(crate) fn awake(&self, side: Side) -> (SlotCount, SlotCount) {
        self.side(side).1.awake()
    }

    /// As [`SlotMap::has_run`].
    pub(crate) fn has_run(&self, side: Side, want: SlotCount) -> bool {
        self.side(side).1.has_run(want)
    }

    /// As [`SlotMap::sleep`].
    pub(crate) fn sleep(&self, side: Side) -> Option<SlotId> {
        let (start, map) = self.side(side);
        map.sleep().map(|slot| SlotId(start + slot.0))
    }

    /// As [`SlotMap::take_run`].
    pub(crate) fn take_run(&self, side: Side, want: SlotCount) -> Option<(SlotId, SlotCount)> {
        let (start, map) = self.side(side);
        map.take_run(want).map(|(slot, count)| (SlotId(start + slot.0), count))
    }

    /// Slots of a side that no page and no child needs.
    pub(crate) fn room(&self, side: Side) -> SlotCount {
        let (_, map) = self.side(side);
        SlotCount(map.slots().0.saturating_sub(map.in_use().0 + map.in_limbo().0))
    }

    /// Slots of a side.
    pub(crate) fn slots_of(&self, side: Side) -> SlotCount {
        self.side(side).1.slots()
    }

    /// Slots of a side that are given out.
    pub(crate) fn in_use_of(&self, side: Side) -> SlotCount {
        self.side(side).1.in_use()
    }

    /// The slots of a side up to the last that was ever given out.
    pub(crate) fn touched(&self, side: Side) -> Range<u64> {
        let (start, map) = self.side(side);
        start..start + map.touched().0
    }

    // Of a slot.

    /// As [`SlotMap::put`].
    pub(crate) fn put(&self, slot: SlotId) {
        let (start, map) = self.side(self.side_of(slot));
        map.put(SlotId(slot.0 - start));
    }

    /// As [`SlotMap::is_held`].
    pub(crate) fn is_held(&self, slot: SlotId) -> bool {
        let (start, map) = self.side(self.side_of(slot));
        map.is_held(SlotId(slot.0 - start))
    }

    /// As [`SlotMap::discarded`].
    pub(crate) fn discarded(&self, run: (SlotId, SlotCount)) {
        let (start, map) = self.side(self.side_of(run.0));
        map.discarded((SlotId(run.0.0 - start), run.1));
    }

    // Of all.

    /// Slots that there are.
    pub(crate) fn slots(&self) -> SlotCount {
        self.sum(SlotMap::slots)
    }

    /// Slots given out.
    pub(crate) fn in_use(&self) -> SlotCount {
        self.sum(SlotMap::in_use)
    }

    /// As [`SlotMap::in_limbo`].
    pub(crate) fn in_limbo(&self) -> SlotCount {
        self.sum(SlotMap::in_limbo)
    }

    /// As [`SlotMap::stale`].
    pub(crate) fn stale(&self) -> (SlotCount, SlotCount) {
        (self.sum(|map| map.stale().0), self.in_use())
    }

    /// As [`SlotMap::next_discardable`].
    pub(crate) fn next_discardable(
        &self,
        least: SlotCount,
        most: SlotCount,
    ) -> Option<(SlotId, SlotCount)> {
        self.sides().find_map(|side| {
            let (start, map) = self.side(side);
            map.next_discardable(least, most).map(|(slot, count)| (SlotId(start + slot.0), count))
        })
    }

    /// As [`SlotMap::hold`].
    ///
    /// # Errors
    /// As [`SlotMap::hold`].
    pub(crate) fn hold(&self) -> Result<Option<HoldId>> {
        let Some(hold) = self.first.hold()? else { return Ok(None) };
        let Some((_, map)) = &self.second else { return Ok(Some(hold)) };
        let second = map.hold();
        if !matches!(second, Ok(Some(_))) {
            self.first.end_hold(hold);
            return second;
        }
        // Both begin and end together, each with the first number that is free.
        assert_eq!(second, Ok(Some(hold)), "the sides have the same holds");
        Ok(Some(hold))
    }

    /// As [`SlotMap::end_hold`].
    pub(crate) fn end_hold(&self, hold: HoldId) {
        self.first.end_hold(hold);
        if let Some((_, map)) = &self.second {
            map.end_hold(hold);
        }
    }
}
