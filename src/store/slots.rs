//! Who owns which part of a store: slots are given out at write-back and come back when pages die.
//!
//! A [`SlotMap`] cuts a store into slots of one size. The life of a slot:
//!
//! ```text
//!   asleep <--wake, sleep--> clear
//!   clear --take_run--> in use --put--> stale --next_discardable--> discarding
//!    ^                    ^               |                             |
//!    |                    '---take_run----'                             |
//!    '----------------------------discarded-----------------------------'
//!
//!   in use --put, and held--> limbo --the last hold of it ends--> stale
//! ```
//! A forked child reads the slots that were in use when it was forked. So the fork takes a *hold* of them
//! ([`hold`](SlotMap::hold)): until it [ends](SlotMap::end_hold) such a slot stays what it is, also once it
//! has been put back.
//!
//! A *stale* slot was put back and still takes space on the device. It is given out like any other that
//! is free, and alone once more than a quarter as many slots are stale as are in use: so a file grows to
//! a quarter more than its pages ever took at once, and most of its slots are never discarded. Taking
//! stale slots only, however few there are, made the file no larger than its pages, but nearly every
//! write one page long: 43 to 55 us of processor time an access instead of 30 to 36 (4 KiB pages, half
//! of the accesses writes, eight threads).
//!
//! Slots wake and sleep by groups of [`GROUP_SLOTS`], whose tables their owner keeps: a slot that is
//! asleep takes no memory, so that tables are in proportion to what is stored, and not to the device.
//!
//! Runs are given out first-fit from a cursor that goes round, so that one batch of write-backs
//! follows the other on the device. The lock (rank `Slots`) is held for searches only, never for
//! I/O: the caller discards between [`next_discardable`](SlotMap::next_discardable) and
//! [`discarded`](SlotMap::discarded). Allocates nothing from the Rust heap.
//!
//! # Invariants
//! 1. A slot is in at most one of `free` and `used`; in none while discarding or asleep.
//! 2. What is in `stale` is in `free` too.
//! 3. A group is asleep as a whole, and none of its slots is stale.
//! 4. A slot in `limbo` is in a hold, and in no other set. A slot in a hold is in `used` or in `limbo`.

use super::bits::BitSet;
use crate::base::error::Result;
use crate::base::sync::Rank;
use crate::base::units::{SlotCount, SlotId};
use crate::sys::signals::FaultLock;

/// Slots that wake and sleep together: those whose hashes, 8 bytes each, share a kernel page.
pub(crate) const GROUP_SLOTS: u64 = 512;

/// Runs looked at before the longest of them is taken. More find longer runs on a fragmented
/// store, under the lock.
const CANDIDATES_MAX: u32 = 16;

/// Stale runs that one search for a run to discard looks at, under the lock.
const DISCARD_LOOKS_MAX: u32 = 64;

/// Holds that there may be at once: children whose parent has far memory.
pub(crate) const HOLDS_MAX: usize = 64;

/// Names a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldId(usize);

/// Slots in use for each that may be stale before stale ones alone are given out.
const USED_PER_STALE: u64 = 4;

/// The slots of one store.
#[derive(Debug)]
pub(crate) struct SlotMap {
    slots: SlotCount,
    state: FaultLock<SlotSets>,
}

#[derive(Debug)]
struct SlotSets {
    free: BitSet,
    used: BitSet,
    /// Those of `free` that take space on the device.
    stale: BitSet,
    /// Put back, and held.
    limbo: BitSet,
    /// Beginning of each hold.
    holds: [Option<BitSet>; HOLDS_MAX],
    /// Groups that are asleep.
    asleep: BitSet,
    /// Where the next group that may go to sleep is looked for.
    sleep_cursor: u64,
    /// Slots from here on were never given out.
    untouched: u64,
    /// Where the next run is looked for.
    cursor: u64,
    /// Where the next discard is looked for.
    discard_cursor: u64,
}

impl SlotMap {
    /// Creates the map of a store with `slots` slots, all of them asleep.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when there is no address space for it.
    pub(crate) fn new(slots: SlotCount) -> Result<SlotMap> {
        let state = SlotSets {
            free: BitSet::empty(slots.get())?,
            used: BitSet::empty(slots.get())?,
            stale: BitSet::empty(slots.get())?,
            limbo: BitSet::empty(slots.get())?,
            holds: [const { None }; HOLDS_MAX],
            asleep: BitSet::full(slots.get().div_ceil(GROUP_SLOTS))?,
            sleep_cursor: 0,
            untouched: 0,
            cursor: 0,
            discard_cursor: 0,
        };
        Ok(SlotMap { slots, state: FaultLock::new(Rank::Slots, state) })
    }

    /// The slots of a group.
    fn range(&self, group: u64) -> (u64, u64) {
        let first = group * GROUP_SLOTS;
        (first, GROUP_SLOTS.min(self.slots.get() - first))
    }

    /// Makes the first group that is asleep free; `false` when none is.
    pub(crate) fn wake(&self) -> bool {
        let group = self.state.lock().asleep.next(0);
        group.map(|group| self.wake_group(group)).is_some()
    }

    /// Lets the slots of a group be given out again that was just put to sleep; its first slot is `first`.
    pub(crate) fn wake_again(&self, first: SlotId) {
        self.wake_group(first.0 / GROUP_SLOTS);
    }

    /// One thread wakes and puts to sleep.
    fn wake_group(&self, group: u64) {
        let mut state = self.state.lock();
        state.asleep.remove(group, 1);
        let (first, count) = self.range(group);
        state.free.insert(first, count);
    }

    /// Puts a group that is free as a whole, and takes no space, to sleep; its first slot.
    pub(crate) fn sleep(&self) -> Option<SlotId> {
        /// Groups looked at before the search goes on another time.
        const LOOKS_MAX: u64 = 4096;
        let groups = self.slots.get().div_ceil(GROUP_SLOTS);
        let mut state = self.state.lock();
        for _ in 0..LOOKS_MAX.min(groups) {
            // Of the last group the rest is used first: from the end.
            let group = match state.sleep_cursor {
                0 => groups - 1,
                at => at.min(groups) - 1,
            };
            state.sleep_cursor = group;
            let (first, count) = self.range(group);
            if state.free.run(first, count) == count && state.stale.is_clear(first, count) {
                state.free.remove(first, count);
                state.asleep.insert(group, 1);
                return Some(SlotId(first));
            }
        }
        None
    }

    /// True if any group is asleep.
    pub(crate) fn has_asleep(&self) -> bool {
        self.state.lock().asleep.count() > 0
    }

    /// Slots that can be given out now, and slots given out.
    pub(crate) fn awake(&self) -> (SlotCount, SlotCount) {
        let state = self.state.lock();
        (SlotCount(state.free.count()), SlotCount(state.used.count()))
    }

    /// True if a run of `want` slots would be found, or none is looked for among slots that wake.
    pub(crate) fn has_run(&self, want: SlotCount) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.reuses() {
            return true;
        }
        let run = find_run(&mut state.free, state.cursor, want.get());
        run.is_some_and(|(_, count)| count == want.get())
    }

    /// Slots that there are.
    pub(crate) fn slots(&self) -> SlotCount {
        self.slots
    }

    /// Slots given out.
    pub(crate) fn in_use(&self) -> SlotCount {
        SlotCount(self.state.lock().used.count())
    }

    /// Slots up to the last that was ever given out.
    pub(crate) fn touched(&self) -> SlotCount {
        SlotCount(self.state.lock().untouched)
    }

    /// Slots put back whose space has not been discarded, and slots given out.
    pub(crate) fn stale(&self) -> (SlotCount, SlotCount) {
        let state = self.state.lock();
        (SlotCount(state.stale.count()), SlotCount(state.used.count()))
    }

    /// Gives out a run of 1 to `want` slots; prefers `want`, then the longest run nearby. `None`:
    /// no slot is left but those being discarded at the moment.
    pub(crate) fn take_run(&self, want: SlotCount) -> Option<(SlotId, SlotCount)> {
        assert!(want.get() > 0, "a run of no slots");
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let source = if state.reuses() { &mut state.stale } else { &mut state.free };
        let (first, count) = find_run(source, state.cursor, want.get())?;
        state.free.remove(first, count);
        state.remove_stale(first, count);
        state.used.insert(first, count);
        state.cursor = first + count;
        state.untouched = state.untouched.max(first + count);
        Some((SlotId(first), SlotCount(count)))
    }

    /// Takes a slot back; its bytes are not needed any more.
    ///
    /// # Panics
    /// When the slot is not in use: somebody's page would be overwritten later.
    pub(crate) fn put(&self, slot: SlotId) {
        self.put_all(&[slot]);
    }

    /// Takes slots back under one lock.
    ///
    /// # Panics
    /// As [`put`](SlotMap::put); the slots before the offending one are back then.
    pub(crate) fn put_all(&self, slots: &[SlotId]) {
        let mut state = self.state.lock();
        for slot in slots {
            let known = *slot < SlotId(self.slots.get()) && state.used.run(slot.get(), 1) == 1;
            assert!(known, "{slot} is put back but not in use");
            state.used.remove(slot.get(), 1);
            if state.is_held(slot.get()) {
                state.limbo.insert(slot.get(), 1);
            } else {
                state.free.insert(slot.get(), 1);
                state.stale.insert(slot.get(), 1);
            }
        }
    }

    /// Keeps the slots that are in use now as they are, until the hold [ends](SlotMap::end_hold). `None`:
    /// there are [`HOLDS_MAX`] already.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when there is no address space for it.
    pub(crate) fn hold(&self) -> Result<Option<HoldId>> {
        let mut held = BitSet::empty(self.slots.get())?;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(at) = state.holds.iter().position(Option::is_none) else { return Ok(None) };
        let mut next = 0;
        while let Some(first) = state.used.next(next) {
            let count = state.used.run(first, u64::MAX);
            held.insert(first, count);
            next = first + count;
        }
        state.holds[at] = Some(held);
        Ok(Some(HoldId(at)))
    }

    /// Nobody needs what the slots of a hold held at its beginning.
    pub(crate) fn end_hold(&self, hold: HoldId) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let held = state.holds[hold.0].take();
        let mut held = held.expect("a hold ends once");
        let mut next = 0;
        while let Some(slot) = state.limbo.next(next) {
            next = slot + 1;
            if held.run(slot, 1) == 1 && !state.is_held(slot) {
                state.limbo.remove(slot, 1);
                state.free.insert(slot, 1);
                state.stale.insert(slot, 1);
            }
        }
    }

    /// True if a slot has to stay as it is for a hold.
    pub(crate) fn is_held(&self, slot: SlotId) -> bool {
        self.state.lock().is_held(slot.get())
    }

    /// Slots that were put back, and cannot be given out because they are held.
    pub(crate) fn in_limbo(&self) -> SlotCount {
        SlotCount(self.state.lock().limbo.count())
    }

    /// Hands out a run of `least` to `most` stale slots for the caller to discard; nobody gets them
    /// before [`discarded`](SlotMap::discarded). `None`: none is as long, or none of the next
    /// [`DISCARD_LOOKS_MAX`]; the search goes on from there another time.
    pub(crate) fn next_discardable(
        &self,
        least: SlotCount,
        most: SlotCount,
    ) -> Option<(SlotId, SlotCount)> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        for _ in 0..DISCARD_LOOKS_MAX {
            let cursor = state.discard_cursor;
            let first = state.stale.next(cursor).or_else(|| state.stale.next(0))?;
            let count = state.stale.run(first, most.get());
            state.discard_cursor = first + count;
            if count >= least.get() {
                state.stale.remove(first, count);
                state.free.remove(first, count);
                return Some((SlotId(first), SlotCount(count)));
            }
        }
        None
    }

    /// Makes a run from [`next_discardable`](SlotMap::next_discardable) free, whether or not the
    /// device took the discard.
    ///
    /// # Panics
    /// When one of the slots is not being discarded.
    pub(crate) fn discarded(&self, run: (SlotId, SlotCount)) {
        let (first, count) = (run.0.get(), run.1.get());
        let mut state = self.state.lock();
        let idle = state.used.is_clear(first, count) && state.free.is_clear(first, count);
        assert!(idle, "{count} slots from {first} are in use, not being discarded");
        state.free.insert(first, count);
    }
}

impl SlotSets {
    fn is_held(&mut self, slot: u64) -> bool {
        self.holds.iter_mut().flatten().any(|held| held.run(slot, 1) == 1)
    }

    /// True if only slots that take space already are given out.
    fn reuses(&self) -> bool {
        self.stale.count() > self.used.count() / USED_PER_STALE
    }

    /// Takes out of `stale` what is in a range of it.
    fn remove_stale(&mut self, first: u64, count: u64) {
        let end = first + count;
        let mut at = first;
        while let Some(next) = self.stale.next(at).filter(|next| *next < end) {
            at = next + self.stale.run(next, end - next);
            self.stale.remove(next, at - next);
        }
    }
}

/// Finds a run of `want` numbers from `cursor` on, going round once; else the longest of the first
/// [`CANDIDATES_MAX`] runs.
fn find_run(set: &mut BitSet, cursor: u64, want: u64) -> Option<(u64, u64)> {
    let mut best: Option<(u64, u64)> = None;
    let mut position = cursor;
    let mut wrapped = false;
    for _ in 0..CANDIDATES_MAX {
        let found = set.next(position).or_else(|| {
            let again = if wrapped { None } else { set.next(0) };
            wrapped = true;
            again
        });
        let Some(first) = found.filter(|first| !wrapped || *first < cursor || best.is_none())
        else {
            break;
        };
        let count = set.run(first, want);
        if best.is_none_or(|(_, longest)| count > longest) {
            best = Some((first, count));
        }
        if count == want {
            break;
        }
        position = first + count;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::ExpectedPanic;
    use proptest::prelude::*;
    use proptest::test_runner::{Config, RngSeed, TestRunner};
    use std::collections::{BTreeMap, BTreeSet};

    /// A map all of whose slots are awake.
    fn map(slots: u64) -> SlotMap {
        let map = SlotMap::new(SlotCount(slots)).expect("slot map");
        while map.wake() {}
        map
    }

    fn take(map: &SlotMap, want: u64) -> Option<(u64, u64)> {
        map.take_run(SlotCount(want)).map(|(slot, count)| (slot.get(), count.get()))
    }

    fn any_discardable(map: &SlotMap) -> Option<(SlotId, SlotCount)> {
        map.next_discardable(SlotCount(1), SlotCount(1024))
    }

    #[test]
    fn successive_runs_are_neighbours() {
        let map = map(1_000);
        assert_eq!(take(&map, 64), Some((0, 64)));
        assert_eq!(take(&map, 64), Some((64, 64)));
        map.put(SlotId(3));
        assert_eq!(take(&map, 1), Some((128, 1)), "the cursor does not turn back");
    }

    #[test]
    fn a_whole_run_is_preferred_to_a_near_scrap() {
        let map = map(100);
        assert_eq!(take(&map, 100), Some((0, 100)));
        for slot in (0..10).chain(40..60).filter(|slot| *slot != 5) {
            map.put(SlotId(slot));
        }
        while let Some(run) = any_discardable(&map) {
            map.discarded(run);
        }
        assert_eq!(take(&map, 16), Some((40, 16)));
        assert_eq!(take(&map, 16), Some((0, 5)), "the longest there is");
    }

    #[test]
    fn stale_slots_alone_are_taken_once_they_are_more_than_a_quarter_of_those_in_use() {
        let map = map(1000);
        assert_eq!(take(&map, 100), Some((0, 100)));
        (0..20).for_each(|n| map.put(SlotId(4 * n)));
        assert_eq!(map.stale(), (SlotCount(20), SlotCount(80)));
        assert_eq!(take(&map, 8), Some((100, 8)), "untouched ones follow each other");
        (20..24).for_each(|n| map.put(SlotId(4 * n)));
        assert_eq!(map.stale(), (SlotCount(24), SlotCount(84)));
        assert!(map.has_run(SlotCount(500)), "none of those that are asleep would be taken");
        assert_eq!(take(&map, 8), Some((0, 1)));
        assert_eq!(take(&map, 8), Some((4, 1)));
        assert_eq!(take(&map, 8), Some((8, 1)));
        assert_eq!(map.stale(), (SlotCount(21), SlotCount(87)));
    }

    #[test]
    fn no_more_slots_are_touched_than_a_quarter_above_the_most_in_use_at_once() {
        let map = map(10_000);
        let mut used: Vec<u64> = (0..1000).map(|_| take(&map, 1).expect("room").0).collect();
        let rounds: usize = if cfg!(miri) { 100 } else { 20_000 };
        for round in 0..rounds {
            let old = round.wrapping_mul(7919) % used.len();
            let new = take(&map, 1).expect("room").0;
            map.put(SlotId(std::mem::replace(&mut used[old], new)));
        }
        assert!(map.touched() <= SlotCount(1252), "{}", map.touched());
    }

    #[test]
    fn runs_that_are_too_short_to_be_discarded_are_passed_over() {
        let map = map(10_000);
        assert_eq!(take(&map, 1000), Some((0, 1000)));
        (0..40).for_each(|n| map.put(SlotId(2 * n)));
        (500..600).for_each(|n| map.put(SlotId(n)));
        let next = |least, most| map.next_discardable(SlotCount(least), SlotCount(most));
        assert_eq!(next(60, 64), Some((SlotId(500), SlotCount(64))));
        assert_eq!(next(60, 64), None, "36 are left of that");
        let rest: Vec<u64> = std::iter::from_fn(|| next(1, 64)).map(|run| run.1.get()).collect();
        assert_eq!((rest.len(), rest.iter().sum::<u64>()), (41, 76), "{rest:?}");
    }

    #[test]
    fn slots_being_discarded_are_out_of_reach_until_discarded() {
        let map = map(3);
        assert_eq!(take(&map, 3), Some((0, 3)));
        map.put_all(&[SlotId(2), SlotId(1)]);
        let run = any_discardable(&map).expect("two are stale");
        assert_eq!(run, (SlotId(1), SlotCount(2)), "neighbours are merged");
        assert_eq!(any_discardable(&map), None);
        assert_eq!(take(&map, 1), None);
        map.discarded(run);
        assert_eq!(take(&map, 9), Some((1, 2)));
        assert_eq!(map.stale(), (SlotCount(0), SlotCount(3)));
    }

    #[test]
    #[should_panic(expected = "slot 1 is put back but not in use")]
    fn putting_a_slot_back_twice_panics() {
        let _expected = ExpectedPanic::saying("slot 1 is put back but not in use");
        let map = map(3);
        take(&map, 3);
        map.put(SlotId(1));
        map.put(SlotId(1));
    }

    #[test]
    #[should_panic(expected = "in use, not being discarded")]
    fn discarding_a_used_slot_panics() {
        let _expected = ExpectedPanic::saying("in use, not being discarded");
        let map = map(3);
        take(&map, 2);
        map.discarded((SlotId(1), SlotCount(1)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes address space by the gigabyte")]
    fn a_map_of_billions_of_slots_is_made_and_searched_at_once() {
        let map = SlotMap::new(SlotCount(1 << 36)).expect("slot map");
        assert_eq!(take(&map, 8), None, "all are asleep");
        assert!(map.wake());
        assert_eq!(take(&map, 8), Some((0, 8)));
        assert_eq!(map.slots(), SlotCount(1 << 36));
    }

    #[test]
    fn groups_sleep_when_none_of_their_slots_is_in_use() {
        let map = map(2 * GROUP_SLOTS + 10);
        assert!(!map.has_asleep());
        assert_eq!(take(&map, 2), Some((0, 2)));
        assert_eq!(map.sleep(), Some(SlotId(2 * GROUP_SLOTS)), "a part of a group");
        assert_eq!(map.sleep(), Some(SlotId(GROUP_SLOTS)));
        let free = map.awake().0;
        map.wake_again(SlotId(GROUP_SLOTS));
        assert_eq!(map.awake().0, SlotCount(free.0 + GROUP_SLOTS));
        assert_eq!(map.sleep(), Some(SlotId(GROUP_SLOTS)));
        assert_eq!(map.sleep(), None, "in use");
        assert_eq!(map.awake(), (SlotCount(GROUP_SLOTS - 2), SlotCount(2)));
        assert!(!map.has_run(SlotCount(GROUP_SLOTS)) && map.has_run(SlotCount(100)));
        map.put_all(&[SlotId(0), SlotId(1)]);
        assert_eq!(map.sleep(), None, "still to be discarded");
        let run = any_discardable(&map).expect("two are stale");
        assert_eq!(map.sleep(), None, "being discarded");
        map.discarded(run);
        assert_eq!(map.sleep(), Some(SlotId(0)));
        assert_eq!((take(&map, 1), map.awake().0), (None, SlotCount(0)));
        assert!(map.wake() && map.wake() && map.wake() && !map.wake());
        assert_eq!(map.awake().0, map.slots());
    }

    #[derive(Clone, Debug)]
    enum Action {
        Take(u64),
        Put(prop::sample::Index),
        BeginDiscard,
        EndDiscard(prop::sample::Index),
        Hold,
        EndHold(prop::sample::Index),
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let action = prop_oneof![
            3 => (1_u64..70).prop_map(Action::Take),
            6 => any::<prop::sample::Index>().prop_map(Action::Put),
            1 => Just(Action::BeginDiscard),
            1 => any::<prop::sample::Index>().prop_map(Action::EndDiscard),
            1 => Just(Action::Hold),
            1 => any::<prop::sample::Index>().prop_map(Action::EndHold),
        ];
        prop::collection::vec(action, 1..if cfg!(miri) { 40 } else { 400 })
    }

    /// The map in the plainest words.
    #[derive(Default)]
    struct Model {
        free: BTreeSet<u64>,
        used: BTreeSet<u64>,
        stale: BTreeSet<u64>,
        discarding: Vec<(SlotId, SlotCount)>,
        limbo: BTreeSet<u64>,
        holds: Vec<(HoldId, BTreeMap<u64, u32>)>,
        /// How often each slot was given out: what it holds is of that time.
        given: BTreeMap<u64, u32>,
    }

    impl Model {
        fn is_held(&self, slot: u64) -> bool {
            self.holds.iter().any(|(_, held)| held.contains_key(&slot))
        }

        fn hold(&mut self, map: &SlotMap) {
            match map.hold().expect("address space") {
                None => assert_eq!(self.holds.len(), HOLDS_MAX),
                Some(hold) => {
                    let held = self.used.iter().map(|slot| (*slot, self.given[slot])).collect();
                    self.holds.push((hold, held));
                }
            }
        }

        fn end_hold(&mut self, map: &SlotMap, which: prop::sample::Index) {
            if self.holds.is_empty() {
                return;
            }
            let (hold, _) = self.holds.remove(which.index(self.holds.len()));
            map.end_hold(hold);
            let ended: Vec<u64> =
                self.limbo.iter().copied().filter(|slot| !self.is_held(*slot)).collect();
            for slot in ended {
                self.limbo.remove(&slot);
                self.free.insert(slot);
                self.stale.insert(slot);
            }
        }

        /// The beginning of a hold is as it was, whatever has happened to it since.
        fn check_holds(&self, map: &SlotMap) {
            for (slot, given) in self.holds.iter().flat_map(|(_, held)| held) {
                assert_eq!(self.given[slot], *given, "{slot} was given out again");
                assert!(!self.discarding.iter().any(|run| numbers(*run).contains(slot)), "{slot}");
                assert!(map.is_held(SlotId(*slot)));
            }
            assert_eq!(map.in_limbo().get(), self.limbo.len() as u64);
        }

        fn apply(&mut self, map: &SlotMap, action: &Action) {
            match action {
                Action::Take(want) => self.take(map, *want),
                Action::Put(which) => {
                    let slot = (!self.used.is_empty())
                        .then(|| *self.used.iter().nth(which.index(self.used.len())).expect("one"));
                    if let Some(slot) = slot {
                        self.used.remove(&slot);
                        if self.is_held(slot) {
                            self.limbo.insert(slot);
                        } else {
                            self.free.insert(slot);
                            self.stale.insert(slot);
                        }
                        map.put(SlotId(slot));
                    }
                }
                Action::BeginDiscard => {
                    let run = any_discardable(map);
                    assert_eq!(run.is_none(), self.stale.is_empty());
                    for slot in run.into_iter().flat_map(numbers) {
                        assert!(self.stale.remove(&slot), "{slot} was not stale");
                        assert!(self.free.remove(&slot), "{slot} was not free");
                    }
                    self.discarding.extend(run);
                }
                Action::EndDiscard(which) => {
                    if !self.discarding.is_empty() {
                        let run = self.discarding.remove(which.index(self.discarding.len()));
                        map.discarded(run);
                        self.free.extend(numbers(run));
                    }
                }
                Action::Hold => self.hold(map),
                Action::EndHold(which) => self.end_hold(map, *which),
            }
            self.check_holds(map);
            assert_eq!(map.in_use().get(), self.used.len() as u64);
            assert_eq!(map.stale().0.get(), self.stale.len() as u64);
        }

        fn take(&mut self, map: &SlotMap, want: u64) {
            let run = map.take_run(SlotCount(want));
            assert_eq!(run.is_none(), self.free.is_empty());
            let Some(run) = run else { return };
            assert!((1..=want).contains(&run.1.get()), "{run:?} of {want}");
            let reuses = self.stale.len() > self.used.len() / 4;
            for slot in numbers(run) {
                assert!(self.free.remove(&slot), "{slot} was not there to take");
                assert!(self.stale.remove(&slot) || !reuses, "{slot} takes new space");
                assert!(self.used.insert(slot));
                *self.given.entry(slot).or_default() += 1;
            }
        }
    }

    fn numbers(run: (SlotId, SlotCount)) -> std::ops::Range<u64> {
        run.0.get()..run.0.get() + run.1.get()
    }

    #[test]
    fn random_actions_agree_with_a_model_of_plain_sets() {
        let seed = std::env::var("FARHEAP_SEED")
            .map_or_else(|_| std::process::id().into(), |text| text.parse().expect("a number"));
        println!("FARHEAP_SEED={seed}");
        let config = Config {
            rng_seed: RngSeed::Fixed(seed),
            failure_persistence: None,
            cases: if cfg!(miri) { 2 } else { 64 },
            ..Config::default()
        };
        TestRunner::new(config)
            .run(&(1_u64..if cfg!(miri) { 60 } else { 300 }, actions()), |(slots, actions)| {
                let map = map(slots);
                let mut model = Model { free: (0..slots).collect(), ..Model::default() };
                for action in &actions {
                    model.apply(&map, action);
                }
                Ok(())
            })
            .expect("the map agrees with the model");
    }
}
