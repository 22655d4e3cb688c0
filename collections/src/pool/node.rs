//! The layout of a node: slots grow up from the head, entries down from the end.
//!
//! A slot has its entry's place and its key's *head*: the two bytes behind those that all keys of the node
//! share. So a search reads slots, which lie side by side, and entries only where heads are equal; of most
//! nodes that is one, where each entry was a miss of the processor's cache
//! (`book/src/measurements/pool_rates.md`, the B+-tree).
//!
//! A leaf remembers where the last new key went, and how many before it went each right behind the one
//! before: keys that come in ascending order, in all of the tree or in a part of it, fill their leaves
//! (`shape`).
//!
//! # Invariants
//! 1. All keys of a leaf, and all but the first of an inner node, begin with the same `skip` bytes, and the
//!    heads of these are the two bytes behind, zeros where a key ends. The first head of an inner node is 0.

use farheap::pool::OptimisticGuard;
use std::cmp::Ordering;
use std::ops::Range;

const RUN_AT: usize = 1;
const COUNT_AT: usize = 2;
const HEAP_AT: usize = 4;
const GARBAGE_AT: usize = 6;
const STAMP_AT: usize = 8;
const LAST_AT: usize = 16;
const SKIP_AT: usize = 18;
const HEAD: usize = 20;
const SLOT: usize = 4;

/// Lengths from here on take two bytes, the first of which is no less.
const LONG: usize = 128;

/// Bytes of a node, however they are looked at. `None` is outside of it.
trait Bytes: Copy {
    fn byte(self, at: usize) -> Option<u8>;
    fn u16(self, at: usize) -> Option<u16>;
    fn u32(self, at: usize) -> Option<u32>;
    fn compare(self, at: usize, len: usize, key: &[u8]) -> Option<Ordering>;
}

impl Bytes for &[u8] {
    fn byte(self, at: usize) -> Option<u8> {
        self.get(at).copied()
    }

    fn u16(self, at: usize) -> Option<u16> {
        self.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
    }

    fn u32(self, at: usize) -> Option<u32> {
        self.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn compare(self, at: usize, len: usize, key: &[u8]) -> Option<Ordering> {
        self.get(at..at.checked_add(len)?).map(|here| here.cmp(key))
    }
}

impl Bytes for OptimisticGuard<'_> {
    #[inline]
    fn byte(self, at: usize) -> Option<u8> {
        OptimisticGuard::byte(&self, at)
    }

    #[inline]
    fn u16(self, at: usize) -> Option<u16> {
        OptimisticGuard::u16(&self, at)
    }

    #[inline]
    fn u32(self, at: usize) -> Option<u32> {
        OptimisticGuard::u32(&self, at)
    }

    #[inline]
    fn compare(self, at: usize, len: usize, key: &[u8]) -> Option<Ordering> {
        OptimisticGuard::compare(&self, at, len, key)
    }
}

fn read<B: Bytes>(bytes: B, at: usize) -> Option<usize> {
    bytes.u16(at).map(usize::from)
}

fn write(bytes: &mut [u8], at: usize, value: usize) {
    let value = u16::try_from(value).expect("offsets within a page fit");
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// A slot: `head 2 | place of the entry 2`, as a number.
#[derive(Clone, Copy)]
struct Slot(u32);

impl Slot {
    fn new(head: u16, entry: usize) -> Slot {
        let entry = u16::try_from(entry).expect("offsets within a page fit");
        Slot(u32::from(head) << 16 | u32::from(entry))
    }

    #[inline]
    fn read<B: Bytes>(bytes: B, slot: usize) -> Option<Slot> {
        bytes.u32(HEAD + slot * SLOT).map(Slot)
    }

    fn write(self, bytes: &mut [u8], slot: usize) {
        bytes[HEAD + slot * SLOT..][..SLOT].copy_from_slice(&self.0.to_le_bytes());
    }

    fn head(self) -> u16 {
        (self.0 >> 16) as u16
    }

    fn entry(self) -> usize {
        usize::from(self.0 as u16)
    }
}

/// The head of a key in a node whose keys share their first `skip` bytes.
fn head_of(key: &[u8], skip: usize) -> u16 {
    match key.get(skip..) {
        Some([first, second, ..]) => u16::from_be_bytes([*first, *second]),
        Some([last]) => u16::from_be_bytes([*last, 0]),
        _ => 0,
    }
}

/// Bytes of a length.
fn length_bytes(len: usize) -> usize {
    if len < LONG { 1 } else { 2 }
}

/// A length, and where it ends.
fn length<B: Bytes>(bytes: B, at: usize) -> Option<(usize, usize)> {
    let first = usize::from(bytes.byte(at)?);
    if first < LONG {
        return Some((first, at + 1));
    }
    let second = usize::from(bytes.byte(at + 1)?);
    Some(((first - LONG) << 8 | second, at + 2))
}

/// Writes a length; returns where it ends.
fn write_length(bytes: &mut [u8], at: usize, len: usize) -> usize {
    let end = at + length_bytes(len);
    let long = u16::try_from(LONG << 8 | len).expect("an entry is at most a quarter of a page");
    if len < LONG {
        bytes[at] = len as u8;
    } else {
        bytes[at..end].copy_from_slice(&long.to_be_bytes());
    }
    end
}

/// Where an entry has its key, and behind it its value.
#[derive(Clone, Copy)]
struct EntryPlace {
    key: usize,
    key_len: usize,
    value_len: usize,
}

impl EntryPlace {
    #[inline]
    fn read<B: Bytes>(bytes: B, slot: Slot) -> Option<EntryPlace> {
        let (key_len, at) = length(bytes, slot.entry())?;
        let (value_len, key) = length(bytes, at)?;
        Some(EntryPlace { key, key_len, value_len })
    }

    fn key(self) -> Range<usize> {
        self.key..self.key + self.key_len
    }

    fn value(self) -> Range<usize> {
        self.key().end..self.key().end + self.value_len
    }
}

/// The slot of `key`, or where it belongs; see [`Node::find`].
#[inline]
fn find<B: Bytes>(bytes: B, key: &[u8]) -> Option<Result<usize, usize>> {
    let (count, skip) = (read(bytes, COUNT_AT)?, read(bytes, SKIP_AT)?);
    let head = head_of(key, skip);
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low.midpoint(high);
        let slot = Slot::read(bytes, middle)?;
        let mut order = slot.head().cmp(&head);
        if order == Ordering::Equal {
            let entry = EntryPlace::read(bytes, slot)?;
            order = bytes.compare(entry.key, entry.key_len, key)?;
        }
        match order {
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
            Ordering::Equal => return Some(Ok(middle)),
        }
    }
    // Heads say nothing of a key that does not begin as the others do: it is below or above all of them.
    let first = first_sharing(bytes)?;
    if count <= first || skip == 0 {
        return Some(Err(low));
    }
    // One that a caller looks at next.
    let beside = EntryPlace::read(bytes, Slot::read(bytes, low.saturating_sub(1).max(first))?)?;
    let begin = &key[..skip.min(key.len())];
    Some(Err(match bytes.compare(beside.key, skip, begin)? {
        Ordering::Equal => low,
        Ordering::Greater => first,
        Ordering::Less => count,
    }))
}

/// The first slot whose key begins as the others do: all of a leaf do, and an inner node's first may be
/// smaller than what it stands for.
fn first_sharing<B: Bytes>(bytes: B) -> Option<usize> {
    Some(usize::from(bytes.byte(0)? != 1))
}

/// For what was read of a node that is held.
const WHOLE: &str = "a node is whole";

/// An inner node's entry for a child: its page, and the stamp that the child must bear.
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
    let lengths = length_bytes(key.len()) + length_bytes(value.len());
    SLOT + lengths + key.len() + value.len()
}

/// A node that is held.
#[derive(Clone, Copy)]
pub(super) struct Node<'a>(pub(super) &'a [u8]);

impl<'a> Node<'a> {
    pub(super) fn is_leaf(self) -> bool {
        self.0[0] == 1
    }

    pub(super) fn count(self) -> usize {
        read(self.0, COUNT_AT).expect(WHOLE)
    }

    fn entry(self, slot: usize) -> EntryPlace {
        let entry = Slot::read(self.0, slot).and_then(|slot| EntryPlace::read(self.0, slot));
        entry.expect(WHOLE)
    }

    pub(super) fn key(self, slot: usize) -> &'a [u8] {
        &self.0[self.entry(slot).key()]
    }

    pub(super) fn value_range(self, slot: usize) -> Range<usize> {
        self.entry(slot).value()
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
        find(self.0, key).expect(WHOLE)
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
    pub(super) fn run(self) -> AscendingRun {
        AscendingRun { length: self.0[RUN_AT], last: self.0.u16(LAST_AT).expect(WHOLE) }
    }

    /// Where the entries begin.
    fn heap(self) -> usize {
        read(self.0, HEAP_AT).expect(WHOLE)
    }

    /// Bytes of entries that were removed.
    fn garbage(self) -> usize {
        read(self.0, GARBAGE_AT).expect(WHOLE)
    }

    /// Bytes of slots and entries.
    pub(super) fn used(self) -> usize {
        self.count() * SLOT + (self.0.len() - self.heap()) - self.garbage()
    }

    /// Of these, of the entries in `slots`.
    pub(super) fn used_by(self, slots: Range<usize>) -> usize {
        slots.map(|slot| entry_bytes(self.key(slot), self.value(slot))).sum()
    }

    /// Bytes that entries may take.
    pub(super) fn room(self) -> usize {
        self.0.len() - HEAD
    }
}

/// Keys that come in ascending order: new ones that went into a leaf each right behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AscendingRun {
    length: u8,
    last: u16,
}

/// From this length on a run is expected to go on.
const RUN_MIN: u8 = 3;

impl AscendingRun {
    /// The run when a new key goes to `slot`.
    fn with(self, slot: usize) -> AscendingRun {
        let goes_on = slot as u16 == self.last.wrapping_add(1);
        AscendingRun {
            length: if goes_on { self.length.saturating_add(1) } else { 0 },
            last: slot as u16,
        }
    }

    /// True if a key that goes to `slot` is one more of several.
    pub(super) fn reaches(self, slot: usize) -> bool {
        self.with(slot).length >= RUN_MIN
    }

    /// The run that goes on at `slot`.
    pub(super) fn before(self, slot: usize) -> AscendingRun {
        AscendingRun { last: (slot as u16).wrapping_sub(1), ..self }
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

    pub(super) fn set_run(&mut self, run: AscendingRun) {
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
        let free = self.node().heap() - HEAD - self.node().count() * SLOT;
        if free < need {
            self.compact();
        }
        self.insert(slot, key, value);
        Some(found.is_err())
    }

    /// Puts an entry at a slot; it fits.
    fn insert(&mut self, slot: usize, key: &[u8], value: &[u8]) {
        let count = self.node().count();
        let is_sharing = slot >= first_sharing(self.node().0).expect(WHOLE);
        let head = if is_sharing { head_of(key, self.shared_with(key)) } else { 0 };
        let at = self.node().heap() - (entry_bytes(key, value) - SLOT);
        assert!(at >= HEAD + (count + 1) * SLOT, "an entry does not fit");
        let value_length = write_length(self.0, at, key.len());
        let key_at = write_length(self.0, value_length, value.len());
        self.0[key_at..][..key.len()].copy_from_slice(key);
        self.0[key_at + key.len()..][..value.len()].copy_from_slice(value);
        let (from, to) = (HEAD + slot * SLOT, HEAD + count * SLOT);
        self.0.copy_within(from..to, from + SLOT);
        Slot::new(head, at).write(self.0, slot);
        write(self.0, COUNT_AT, count + 1);
        write(self.0, HEAP_AT, at);
    }

    /// Makes sure that the keys, and `key`, share the bytes before their heads; returns how many these are.
    fn shared_with(&mut self, key: &[u8]) -> usize {
        let node = self.node();
        let first = first_sharing(node.0).expect(WHOLE);
        let skip = read(node.0, SKIP_AT).expect(WHOLE);
        if node.count() <= first {
            write(self.0, SKIP_AT, key.len());
            return key.len();
        }
        let common = node.key(first).iter().zip(key).take(skip).take_while(|(a, b)| a == b).count();
        if common < skip {
            write(self.0, SKIP_AT, common);
            for slot in first..self.node().count() {
                let entry = Slot::read(self.node().0, slot).expect(WHOLE).entry();
                let head = head_of(self.node().key(slot), common);
                Slot::new(head, entry).write(self.0, slot);
            }
        }
        common
    }

    fn entry_len(&self, slot: usize) -> usize {
        entry_bytes(self.node().key(slot), self.node().value(slot)) - SLOT
    }

    pub(super) fn value_mut(&mut self, slot: usize) -> &mut [u8] {
        let range = self.node().value_range(slot);
        &mut self.0[range]
    }

    pub(super) fn remove(&mut self, slot: usize) {
        let (count, len) = (self.node().count(), self.entry_len(slot));
        let garbage = self.node().garbage() + len;
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
    pub(super) fn append(&mut self, from: Node<'_>, slots: Range<usize>) {
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
        self.insert(self.node().count(), key, value);
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

    pub(super) fn stamp(self) -> Option<u64> {
        self.0.u64(STAMP_AT)
    }

    pub(super) fn child_of(self, key: &[u8]) -> Option<Child> {
        let slot = find(self.0, key)?.unwrap_or_else(|slot| slot.saturating_sub(1));
        let value = EntryPlace::read(self.0, Slot::read(self.0, slot)?)?.value().start;
        Some(Child { page: self.0.u64(value)?, stamp: self.0.u64(value + 8)? })
    }

    pub(super) fn value_of(self, key: &[u8]) -> Option<Option<Vec<u8>>> {
        let Ok(slot) = find(self.0, key)? else { return Some(None) };
        let entry = EntryPlace::read(self.0, Slot::read(self.0, slot)?)?;
        let mut value = vec![0; entry.value_len];
        self.0.copy_to(entry.value().start, &mut value)?;
        Some(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Bytes of the nodes.
    const BYTES: usize = 4080;

    fn node(leaf: bool) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        NodeMut(&mut bytes).clear(leaf);
        bytes
    }

    /// Keys that share much, little and nothing, that end early, and that are the beginning of others.
    fn keys() -> Vec<Vec<u8>> {
        let mut keys = vec![Vec::new()];
        for prefix in [&b""[..], b"common/prefix/", b"common/pre", &[0xFF; 4], &[0; 3]] {
            for first in [0, 1, 0x7F, 0xFF] {
                keys.push([prefix, &[first]].concat());
                for second in [0, 0xFF] {
                    keys.push([prefix, &[first, second]].concat());
                    keys.push([prefix, &[first, second, 0, 9]].concat());
                }
            }
        }
        keys.push([&[b'x'; 200][..], b"long"].concat());
        keys
    }

    /// Checks invariant 1 and every search against a map.
    fn check(bytes: &[u8], map: &BTreeMap<Vec<u8>, Vec<u8>>, asked: &[Vec<u8>]) {
        let node = Node(bytes);
        let found: Vec<_> =
            (0..node.count()).map(|slot| (node.key(slot), node.value(slot))).collect();
        let expected: Vec<_> = map.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        assert_eq!(found, expected);
        for key in asked {
            let below = map.range(..key.clone()).count();
            let expected = if map.contains_key(key) { Ok(below) } else { Err(below) };
            assert_eq!(node.find(key), expected, "{key:?} among {:?}", map.keys());
        }
    }

    #[test]
    fn a_search_by_heads_finds_what_a_search_by_keys_finds() {
        let keys = keys();
        for start in 0..keys.len() {
            for step in [1, 2, 7, 31] {
                let (mut bytes, mut map) = (node(true), BTreeMap::new());
                for n in 0..keys.len().min(40) {
                    let key = &keys[(start + n * step) % keys.len()];
                    let value = vec![n as u8; n % 5];
                    let is_new = map.insert(key.clone(), value.clone()).is_none();
                    assert_eq!(NodeMut(&mut bytes).put(key, &value), Some(is_new));
                    if n % 3 == 2 {
                        let slot = n % Node(&bytes).count();
                        map.remove(Node(&bytes).key(slot));
                        NodeMut(&mut bytes).remove(slot);
                    }
                }
                check(&bytes, &map, &keys);
                NodeMut(&mut bytes).compact();
                check(&bytes, &map, &keys);
            }
        }
    }

    #[test]
    fn the_first_key_of_an_inner_node_need_not_begin_as_the_others_do() {
        let mut bytes = node(false);
        let child = Child { page: 7, stamp: 1 }.to_bytes();
        NodeMut(&mut bytes).push(b"", &child);
        for key in [&b"prefix/b"[..], b"prefix/d", b"prefix/c"] {
            assert_eq!(NodeMut(&mut bytes).put(key, &child), Some(true));
        }
        assert_eq!(bytes.as_slice().u16(SKIP_AT), Some(7), "the slash and what is before it");
        let slot = |key: &[u8]| Node(&bytes).child_slot(key);
        assert_eq!(
            [b"prefix/a", b"prefix/b", b"prefix/c", b"prefix/z"].map(|key| slot(key)),
            [0, 1, 2, 3]
        );
        assert_eq!((slot(b""), slot(b"a"), slot(b"prefix"), slot(b"q")), (0, 0, 0, 3));
    }

    #[test]
    fn entries_of_small_keys_and_values_take_six_bytes_beside_them() {
        let mut bytes = node(true);
        let count = (BYTES - HEAD) / (8 + 56 + 6);
        for n in 0..count as u64 {
            assert_eq!(NodeMut(&mut bytes).put(&n.to_be_bytes(), &[1; 56]), Some(true), "{n}");
        }
        assert_eq!(NodeMut(&mut bytes).put(&u64::MAX.to_be_bytes(), &[1; 56]), None);
    }
}
