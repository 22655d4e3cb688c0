//! A skip list whose nodes are placed by a strategy.
//!
//! `node` holds nodes; where they live is decided in `place`. The heads of all levels are in the
//! list itself, in whatever memory that is.
//!
//! # Invariants
//! 1. Keys ascend along every level; a node of `n` levels is linked at levels 0 to `n - 1`.
//! 2. Memory for a node is allocated before anything changes.
//! 3. A node is in the set of local nodes exactly while it is linked and purely local.

#![expect(unsafe_code, reason = "hands out references into nodes and frees nodes")]

mod node;
mod place;

pub use place::ListStrategy;

use super::local_set::LocalSet;
use super::ordered::{MapCursor, linked_map, map_traits};
use super::{Links, Refused};
use crate::sub::{AllocError, Collective};
use node::{LEVELS_MAX, Link};
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

/// For each level the last node before a place; `None` is the head.
type Preds<K, V> = [Option<Link<K, V>>; LEVELS_MAX];

/// An ordered map in far memory, as a skip list.
///
/// As [`FarBTreeMap`](super::FarBTreeMap), with one pair per node.
///
/// # Examples
/// ```
/// use farheap_collections::{FarSkipList, ListStrategy};
/// use farheap::store::MemStore;
/// use farheap_collections::sub::{Collective, CollectiveConfig};
/// use farheap::ByteCount;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let collective = match Collective::create(CollectiveConfig::new(), store) {
///     Ok(collective) => Arc::new(collective),
///     // Without permission for userfaultfd; the message says how to get it.
///     Err(error) => return Ok(println!("{error}")),
/// };
/// let mut list = FarSkipList::new(collective, ListStrategy::Page);
/// for key in 0..1000_u64 {
///     list.insert(key, key * 2)?;
/// }
/// list.make_page_aware()?;
/// assert_eq!(list.get(&21), Some(&42));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FarSkipList<K, V> {
    heads: Preds<K, V>,
    len: usize,
    collective: Arc<Collective>,
    strategy: ListStrategy,
    local: LocalSet<Link<K, V>>,
    dice: u64,
    _owns: PhantomData<(K, V)>,
}

// SAFETY: the list owns its nodes and pairs; the collective is shared between threads by design.
unsafe impl<K: Send, V: Send> Send for FarSkipList<K, V> {}
// SAFETY: `&FarSkipList` only reads nodes and hands out `&K` and `&V`.
unsafe impl<K: Sync, V: Sync> Sync for FarSkipList<K, V> {}

impl<K, V> FarSkipList<K, V> {
    /// An empty list. Nothing is allocated.
    #[must_use]
    pub fn new(collective: Arc<Collective>, strategy: ListStrategy) -> FarSkipList<K, V> {
        FarSkipList {
            heads: [None; LEVELS_MAX],
            len: 0,
            collective,
            strategy,
            local: LocalSet::new(),
            dice: 0x9E37_79B9_7F4A_7C15,
            _owns: PhantomData,
        }
    }

    /// Places nodes by another strategy from now on. Those that there are stay where they are until
    /// [`make_page_aware`](FarSkipList::make_page_aware) moves them; it moves none out of purely-local
    /// memory.
    pub fn set_strategy(&mut self, strategy: ListStrategy) {
        self.strategy = strategy;
    }

    /// All pairs in key order.
    #[must_use]
    pub fn iter(&self) -> ListIter<'_, K, V> {
        ListIter::new(Walk(self.heads[0]), self.len)
    }

    /// Counts the links between nodes by where their ends are.
    #[must_use]
    pub fn links(&self) -> Links {
        let mut links = Links::default();
        let mut next = self.heads[0];
        while let Some(node) = next {
            for target in (0..node.levels()).filter_map(|level| node.next(level)) {
                links.count(&self.collective, node.as_ptr(), target.as_ptr());
            }
            next = node.next(0);
        }
        links
    }

    fn next_of(&self, pred: Option<Link<K, V>>, level: usize) -> Option<Link<K, V>> {
        match pred {
            None => self.heads[level],
            Some(node) => node.next(level),
        }
    }

    fn set_next_of(&mut self, pred: Option<Link<K, V>>, level: usize, next: Option<Link<K, V>>) {
        match pred {
            None => self.heads[level] = next,
            Some(node) => node.set_next(level, next),
        }
    }

    /// Removes all pairs. If dropping one panics, those that are left are leaked.
    pub fn clear(&mut self) {
        let mut next = self.heads[0];
        self.heads = [None; LEVELS_MAX];
        self.len = 0;
        // First: a node whose pair is dropped, which may panic, is not to be found any more.
        self.local = LocalSet::new();
        while let Some(node) = next {
            next = node.next(0);
            // SAFETY: an initialised pair of a node that is not in the list any more.
            unsafe { node.pair().drop_in_place() };
            self.free_unlinked(node);
        }
    }

    /// Levels of the next node: one more with probability 1/2 each.
    fn roll_levels(&mut self) -> usize {
        // xorshift64.
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice.trailing_ones() as usize + 1).min(LEVELS_MAX)
    }
}

impl<K: Ord, V> FarSkipList<K, V> {
    /// The pair of a key.
    fn pair<Q>(&self, key: &Q) -> Option<*mut (K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.lookup(key).map(|node| node.pair())
    }

    /// For each level the last node of which `before` says yes; it says yes to a prefix of keys.
    fn seek(&self, mut before: impl FnMut(&K) -> bool) -> Preds<K, V> {
        let mut preds = [None; LEVELS_MAX];
        let mut pred = None;
        // The node that ended the level above ends this one too: no need to look at it again.
        let mut stop = None;
        for level in (0..LEVELS_MAX).rev() {
            let mut next = self.next_of(pred, level);
            while let Some(node) = next
                && next != stop
                && before(node.key())
            {
                pred = next;
                next = node.next(level);
            }
            stop = next;
            preds[level] = pred;
        }
        preds
    }

    /// For each level the last node before a key, and the key's node if it is there.
    fn find<Q>(&self, key: &Q) -> (Preds<K, V>, Option<Link<K, V>>)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let preds = self.seek(|other| other.borrow() < key);
        let node = self.next_of(preds[0], 0);
        (preds, node.filter(|node| key.cmp(node.key().borrow()) == Ordering::Equal))
    }

    /// The node of a key; stops at the level where it is met.
    fn lookup<Q>(&self, key: &Q) -> Option<Link<K, V>>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let (mut pred, mut stop) = (None, None);
        for level in (0..LEVELS_MAX).rev() {
            let mut next = self.next_of(pred, level);
            while let Some(node) = next
                && next != stop
            {
                match node.key().borrow().cmp(key) {
                    Ordering::Equal => return Some(node),
                    Ordering::Greater => break,
                    Ordering::Less => {}
                }
                pred = next;
                next = node.next(level);
            }
            stop = next;
        }
        None
    }

    /// The pairs whose keys are in a range, in key order.
    pub fn range<Q, R>(&self, range: R) -> ListRange<'_, K, V, R, Q>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
        R: RangeBounds<Q>,
    {
        let next = match range.start_bound() {
            // A key that is there may be met at a high level.
            Bound::Included(start) => self.lookup(start).or_else(|| {
                let preds = self.seek(|key| key.borrow() < start);
                self.next_of(preds[0], 0)
            }),
            Bound::Excluded(start) => {
                let preds = self.seek(|key| key.borrow() <= start);
                self.next_of(preds[0], 0)
            }
            Bound::Unbounded => self.heads[0],
        };
        ListRange::new(Walk(next), range)
    }

    /// Inserts a pair; returns the value that the key had before.
    ///
    /// # Errors
    /// [`Refused`] gives the pair back when there is no memory for it: the list is as it was, but
    /// for the places of nodes.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, Refused<K, V>> {
        let (mut preds, found) = self.find(&key);
        if let Some(node) = found {
            // SAFETY: an initialised pair; `&mut self` makes this the only reference.
            let old = unsafe { &mut (*node.pair()).1 };
            return Ok(Some(std::mem::replace(old, value)));
        }
        self.insert_after(&mut preds, (key, value))?;
        Ok(None)
    }

    fn insert_after(
        &mut self,
        preds: &mut Preds<K, V>,
        pair: (K, V),
    ) -> Result<Link<K, V>, Refused<K, V>> {
        let levels = self.roll_levels();
        let memory = match self.place(preds, levels) {
            Ok(memory) => memory,
            Err(error) => return Err(Refused { key: pair.0, value: pair.1, error }),
        };
        // SAFETY: just allocated for a node with that number of levels.
        let node = unsafe { Link::create(memory, levels, pair) };
        for (level, pred) in preds.iter().enumerate().take(levels) {
            node.set_next(level, self.next_of(*pred, level));
            self.set_next_of(*pred, level, Some(node));
        }
        if self.collective.is_local(node.as_ptr()) {
            self.local.add(node);
        }
        self.len += 1;
        Ok(node)
    }

    /// Removes a key; returns the pair.
    pub fn remove_entry<Q>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let (preds, found) = self.find(key);
        let node = found?;
        for (level, pred) in preds.iter().enumerate().take(node.levels()) {
            // An inconsistent `Ord` must not leave a link to a freed node behind.
            assert!(self.next_of(*pred, level) == Some(node), "keys ascend along each level");
        }
        for (level, pred) in preds.iter().enumerate().take(node.levels()) {
            self.set_next_of(*pred, level, node.next(level));
        }
        // SAFETY: the pair is initialised, and nothing links to its node any more.
        let pair = unsafe { node.pair().read() };
        self.free_node(node);
        self.len -= 1;
        Some(pair)
    }

    /// Builds a list of pairs in ascending key order, without searching.
    ///
    /// # Errors
    /// [`AllocError`] when memory ran out; the pairs are dropped.
    ///
    /// # Panics
    /// When the keys do not ascend.
    pub fn bulk_load(
        collective: Arc<Collective>,
        strategy: ListStrategy,
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<FarSkipList<K, V>, AllocError> {
        let mut list = FarSkipList::new(collective, strategy);
        let mut tails: Preds<K, V> = [None; LEVELS_MAX];
        for pair in pairs {
            let ascends = tails[0].is_none_or(|tail| *tail.key() < pair.0);
            assert!(ascends, "the keys of a bulk load ascend");
            let node = list.insert_after(&mut tails, pair).map_err(|refused| refused.error)?;
            tails[..node.levels()].fill(Some(node));
        }
        list.make_page_aware()?;
        Ok(list)
    }
}

/// A place at the lowest level.
#[derive(Debug)]
struct Walk<K, V>(Option<Link<K, V>>);

impl<K, V> MapCursor<K, V> for Walk<K, V> {
    fn peek<'a>(&self) -> Option<(&'a K, &'a V)>
    where
        K: 'a,
        V: 'a,
    {
        self.0.map(Link::entry)
    }

    fn step(&mut self) {
        self.0 = self.0.and_then(|node| node.next(0));
    }

    fn finish(&mut self) {
        self.0 = None;
    }
}

map_traits!(FarSkipList, ListIter);
linked_map!(FarSkipList, Walk, ListIter, ListRange);
