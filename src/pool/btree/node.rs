//! The layout of a node: slots grow up from the head, entries down from the end.
//!
//! A leaf remembers where the last new key went, and how many before it went each right behind the one
//! before: keys that come in ascending order, in all of the tree or in a part of it, fill their leaves
//! (`shape`).

use crate::pool::OptimisticGuard;
use std::cmp::Ordering;

const RUN_AT: usize = 1;
const COUNT_AT: usize = 2;
const HEAP_AT: usize = 4;
const GARBAGE_AT: usize = 6;
const STAMP_AT: usize = 8;
const LAST_AT: usize = 16;
const HEAD: usize = 18;
const SLOT: usize = 2;
const LENGTHS: usize = 4;

fn read(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn write(bytes: &mut [u8], at: usize, value: usize) {
    let value = u16::try_from(value).expect("offsets within a page fit");
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// What an inner node says of a child: its page, and the stamp that the child must bear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Child {
    pub(super) page: u64,
    pub(super) stamp: u64,
}

impl Child {
    pub(super) fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.stamp) << 64 | u128::from(self.page)).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 16]) -> Child {
        let both = u128::from_le_bytes(bytes);
        Child { page: both as u64, stamp: (both >> 64) as u64 }
    }
}

/// Bytes of an entry with its slot.
pub(super) fn entry_bytes(key: &[u8], value: &[u8]) -> usize {
    SLOT + LENGTHS + key.len() + value.len()
}

/// A node that is held.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(pub(super) &'a [u8]);

impl<'a> Node<'a> {
    pub(super) fn is_leaf(self) -> bool {
        self.0[0] == 1
    }

    pub(super) fn count(self) -> usize {
        read(self.0, COUNT_AT)
    }

    fn entry(self, slot: usize) -> usize {
        read(self.0, HEAD + slot * SLOT)
    }

    pub(super) fn key(self, slot: usize) -> &'a [u8] {
        let at = self.entry(slot);
        &self.0[at + LENGTHS..at + LENGTHS + read(self.0, at)]
    }

    pub(super) fn value_range(self, slot: usize) -> std::ops::Range<usize> {
        let at = self.entry(slot);
        let start = at + LENGTHS + read(self.0, at);
        start..start + read(self.0, at + 2)
    }

    pub(super) fn value(self, slot: usize) -> &'a [u8] {
        &self.0[self.value_range(slot)]
    }

    pub(super) fn child(self, slot: usize) -> Child {
        Child::from_bytes(self.value(slot).try_into().expect("a child is sixteen bytes"))
    }

    pub(super) fn stamp(self) -> u64 {
        let bytes = self.0[STAMP_AT..LAST_AT].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    }

    /// The slot of `key`, or where it belongs.
    pub(super) fn find(self, key: &[u8]) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = low.midpoint(high);
            match self.key(middle).cmp(key) {
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
                Ordering::Equal => return Ok(middle),
            }
        }
        Err(low)
    }

    /// The slot of the child that `key` belongs to.
    pub(super) fn child_slot(self, key: &[u8]) -> usize {
        match self.find(key) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        }
    }

    pub(super) fn child_of(self, key: &[u8]) -> Child {
        self.child(self.child_slot(key))
    }

    /// The slot of the child with the largest keys below `key`.
    pub(super) fn child_slot_below(self, key: &[u8]) -> usize {
        self.lower_bound(key).saturating_sub(1)
    }

    /// The slot of the first entry from `key` on.
    pub(super) fn lower_bound(self, key: &[u8]) -> usize {
        self.find(key).unwrap_or_else(|slot| slot)
    }

    /// New keys in a row each of which went right behind the one before, and where the last of them is.
    pub(super) fn run(self) -> Run {
        Run { length: self.0[RUN_AT], last: read(self.0, LAST_AT) as u16 }
    }

    /// Bytes of slots and entries.
    pub(super) fn used(self) -> usize {
        let heap = read(self.0, HEAP_AT);
        self.count() * SLOT + (self.0.len() - heap) - read(self.0, GARBAGE_AT)
    }

    /// Of these, of the entries in `slots`.
    pub(super) fn used_by(self, slots: std::ops::Range<usize>) -> usize {
        slots.map(|slot| entry_bytes(self.key(slot), self.value(slot))).sum()
    }

    /// Bytes that entries may take.
    pub(super) fn room(self) -> usize {
        self.0.len() - HEAD
    }
}

/// Keys that come in ascending order: new ones that went into a leaf each right behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    length: u8,
    last: u16,
}

/// From this length on a run is expected to go on.
const RUN_MIN: u8 = 3;

impl Run {
    /// The run when a new key goes to `slot`.
    fn with(self, slot: usize) -> Run {
        let goes_on = slot as u16 == self.last.wrapping_add(1);
        Run { length: if goes_on { self.length.saturating_add(1) } else { 0 }, last: slot as u16 }
    }

    /// Whether a key that goes to `slot` is one more of several.
    pub(super) fn reaches(self, slot: usize) -> bool {
        self.with(slot).length >= RUN_MIN
    }

    /// The run that goes on at `slot`.
    pub(super) fn before(self, slot: usize) -> Run {
        Run { last: (slot as u16).wrapping_sub(1), ..self }
    }
}

/// A node that is held exclusively.
pub(super) struct NodeMut<'a>(pub(super) &'a mut [u8]);

impl NodeMut<'_> {
    pub(super) fn node(&self) -> Node<'_> {
        Node(self.0)
    }

    /// Empties the node; it keeps its stamp.
    pub(super) fn clear(&mut self, leaf: bool) {
        self.0[..STAMP_AT].fill(0);
        self.0[LAST_AT..HEAD].fill(0);
        self.0[0] = u8::from(leaf);
        let end = self.0.len();
        write(self.0, HEAP_AT, end);
    }

    pub(super) fn set_run(&mut self, run: Run) {
        self.0[RUN_AT] = run.length;
        write(self.0, LAST_AT, usize::from(run.last));
    }

    pub(super) fn set_stamp(&mut self, stamp: u64) {
        self.0[STAMP_AT..LAST_AT].copy_from_slice(&stamp.to_le_bytes());
    }

    /// Adds or replaces an entry; `None` when there is no room, else whether the key is new.
    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) -> Option<bool> {
        let found = self.node().find(key);
        if let Ok(slot) = found
            && self.node().value(slot).len() == value.len()
        {
            self.value_mut(slot).copy_from_slice(value);
            return Some(false);
        }
        let need = entry_bytes(key, value);
        let old = found.map_or(0, |slot| self.entry_len(slot) + SLOT);
        if self.node().used() - old + need > self.node().room() {
            return None;
        }
        let slot = match found {
            Ok(slot) => {
                self.remove(slot);
                slot
            }
            Err(slot) => {
                self.set_run(self.node().run().with(slot));
                slot
            }
        };
        let free = read(self.0, HEAP_AT) - HEAD - self.node().count() * SLOT;
        if free < need {
            self.compact();
        }
        let count = self.node().count();
        let at = read(self.0, HEAP_AT) - (need - SLOT);
        write(self.0, at, key.len());
        write(self.0, at + 2, value.len());
        self.0[at + LENGTHS..at + LENGTHS + key.len()].copy_from_slice(key);
        self.0[at + LENGTHS + key.len()..at + need - SLOT].copy_from_slice(value);
        let (from, to) = (HEAD + slot * SLOT, HEAD + count * SLOT);
        self.0.copy_within(from..to, from + SLOT);
        write(self.0, from, at);
        write(self.0, COUNT_AT, count + 1);
        write(self.0, HEAP_AT, at);
        Some(found.is_err())
    }

    fn entry_len(&self, slot: usize) -> usize {
        let at = self.node().entry(slot);
        LENGTHS + read(self.0, at) + read(self.0, at + 2)
    }

    pub(super) fn value_mut(&mut self, slot: usize) -> &mut [u8] {
        let range = self.node().value_range(slot);
        &mut self.0[range]
    }

    pub(super) fn remove(&mut self, slot: usize) {
        let (count, len) = (self.node().count(), self.entry_len(slot));
        let garbage = read(self.0, GARBAGE_AT) + len;
        let (from, to) = (HEAD + (slot + 1) * SLOT, HEAD + count * SLOT);
        self.0.copy_within(from..to, from - SLOT);
        write(self.0, COUNT_AT, count - 1);
        write(self.0, GARBAGE_AT, garbage);
    }

    /// Moves the entries together.
    fn compact(&mut self) {
        let old = self.0.to_vec();
        self.clear(old[0] == 1);
        self.set_run(Node(&old).run());
        self.append(Node(&old), 0..Node(&old).count());
    }

    /// Appends entries of another node, all greater than those here; they must fit.
    pub(super) fn append(&mut self, from: Node<'_>, slots: std::ops::Range<usize>) {
        for slot in slots {
            self.push(from.key(slot), from.value(slot));
        }
    }

    /// As [`push`](Self::push), if it fits.
    pub(super) fn try_push(&mut self, key: &[u8], value: &[u8]) -> bool {
        let fits = self.node().used() + entry_bytes(key, value) <= self.node().room();
        if fits {
            self.push(key, value);
        }
        fits
    }

    /// Appends an entry greater than all here; it must fit.
    pub(super) fn push(&mut self, key: &[u8], value: &[u8]) {
        let (count, len) = (self.node().count(), LENGTHS + key.len() + value.len());
        let at = read(self.0, HEAP_AT) - len;
        assert!(at >= HEAD + (count + 1) * SLOT, "an entry of {len} bytes does not fit");
        write(self.0, at, key.len());
        write(self.0, at + 2, value.len());
        self.0[at + LENGTHS..at + LENGTHS + key.len()].copy_from_slice(key);
        self.0[at + LENGTHS + key.len()..at + len].copy_from_slice(value);
        write(self.0, HEAD + count * SLOT, at);
        write(self.0, COUNT_AT, count + 1);
        write(self.0, HEAP_AT, at);
    }
}

/// A node that is only looked at: anything may be read, nothing may be believed before
/// validation. `None` says that what was read makes no sense.
#[derive(Clone, Copy)]
pub(super) struct View<'p>(pub(super) OptimisticGuard<'p>);

impl View<'_> {
    pub(super) fn is_leaf(self) -> bool {
        self.0.byte(0) == Some(1)
    }

    fn at(self, at: usize) -> Option<usize> {
        self.0.u16(at).map(usize::from)
    }

    fn find(self, key: &[u8]) -> Option<Result<usize, usize>> {
        let (mut low, mut high) = (0, self.at(COUNT_AT)?);
        while low < high {
            let middle = low.midpoint(high);
            let entry = self.at(HEAD + middle * SLOT)?;
            match self.0.compare(entry + LENGTHS, self.at(entry)?, key)? {
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
                Ordering::Equal => return Some(Ok(middle)),
            }
        }
        Some(Err(low))
    }

    pub(super) fn stamp(self) -> Option<u64> {
        self.0.u64(STAMP_AT)
    }

    pub(super) fn child_of(self, key: &[u8]) -> Option<Child> {
        let slot = self.find(key)?.unwrap_or_else(|slot| slot.saturating_sub(1));
        let entry = self.at(HEAD + slot * SLOT)?;
        let value = entry + LENGTHS + self.at(entry)?;
        Some(Child { page: self.0.u64(value)?, stamp: self.0.u64(value + 8)? })
    }

    pub(super) fn value_of(self, key: &[u8]) -> Option<Option<Vec<u8>>> {
        let Ok(slot) = self.find(key)? else { return Some(None) };
        let entry = self.at(HEAD + slot * SLOT)?;
        let start = entry + LENGTHS + self.at(entry)?;
        let mut value = vec![0; self.at(entry + 2)?];
        self.0.copy_to(start, &mut value)?;
        Some(Some(value))
    }
}
