//! Parts common to the ordered maps: iterators over a cursor, and the usual traits.

#![expect(unsafe_code, reason = "hands out references to values in nodes")]

use std::borrow::Borrow;
use std::ops::{Bound, RangeBounds};

/// A place in a map, in key order.
pub(super) trait MapCursor<K, V> {
    /// The pair here; the caller borrows it no longer than the map stays as it is.
    fn peek<'a>(&self) -> Option<(&'a K, &'a V)>
    where
        K: 'a,
        V: 'a;
    /// Goes on to the next pair.
    fn step(&mut self);
    /// Goes behind the last pair.
    fn finish(&mut self);
}

/// True if a range that starts at or below a key ends above it.
pub(super) fn is_before_end<K, Q>(range: &impl RangeBounds<Q>, key: &K) -> bool
where
    K: Borrow<Q>,
    Q: Ord + ?Sized,
{
    match range.end_bound() {
        Bound::Included(end) => key.borrow() <= end,
        Bound::Excluded(end) => key.borrow() < end,
        Bound::Unbounded => true,
    }
}

/// The value of a pair, for as long as the map is borrowed.
///
/// # Safety
/// The pair is an initialised one of `map`.
pub(super) unsafe fn value<M, K, V>(_map: &M, pair: *mut (K, V)) -> &V {
    // SAFETY: as the caller promises; a map changes pairs by `&mut self` only.
    unsafe { &(*pair).1 }
}

/// The same, for changing it.
///
/// # Safety
/// As for [`value`].
pub(super) unsafe fn value_mut<M, K, V>(_map: &mut M, pair: *mut (K, V)) -> &mut V {
    // SAFETY: as the caller promises; `&mut` makes this the only reference.
    unsafe { &mut (*pair).1 }
}

/// Drop, Debug and iteration of a map with the fields `len` and `collective` and a `clear`.
macro_rules! map_traits {
    ($map:ident, $iter:ident) => {
        impl<K, V> $map<K, V> {
            /// Number of pairs.
            #[must_use]
            pub fn len(&self) -> usize {
                self.len
            }

            /// True if there is no pair.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// The allocator that the nodes come from.
            #[must_use]
            pub fn collective(&self) -> &std::sync::Arc<crate::sub::Collective> {
                &self.collective
            }
        }

        impl<K, V> Drop for $map<K, V> {
            fn drop(&mut self) {
                // The last user of a collective drops all pages at once, without touching them.
                let alone = std::sync::Arc::get_mut(&mut self.collective).is_some();
                if !alone || std::mem::needs_drop::<(K, V)>() {
                    self.clear();
                }
            }
        }

        impl<K: std::fmt::Debug, V: std::fmt::Debug> std::fmt::Debug for $map<K, V> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_map().entries(self).finish()
            }
        }

        impl<'a, K, V> IntoIterator for &'a $map<K, V> {
            type Item = (&'a K, &'a V);
            type IntoIter = $iter<'a, K, V>;
            fn into_iter(self) -> $iter<'a, K, V> {
                self.iter()
            }
        }
    };
}

/// Parts common to the maps of linked nodes: looking a key up in terms of `pair`, `remove` in terms of
/// `remove_entry`, freeing a node, and iterators over a cursor.
macro_rules! linked_map {
    ($map:ident, $cursor:ident, $iter:ident, $range:ident) => {
        impl<K, V> $map<K, V> {
            /// Frees a node that is linked no more; its pairs have been moved out or dropped.
            fn free_node(&mut self, node: Link<K, V>) {
                if self.collective.is_local(node.as_ptr()) {
                    self.local.remove(node);
                }
                self.free_unlinked(node);
            }

            /// Frees a node that the set of local nodes does not know.
            fn free_unlinked(&self, node: Link<K, V>) {
                let is_local = self.collective.is_local(node.as_ptr());
                let (memory, layout) = node.retire(is_local);
                // SAFETY: the node came from this collective with this layout, and its last link is
                // gone.
                unsafe { self.collective.deallocate(memory, layout) };
            }
        }

        impl<K: Ord, V> $map<K, V> {
            /// The value of a key.
            #[must_use]
            pub fn get<Q>(&self, key: &Q) -> Option<&V>
            where
                K: std::borrow::Borrow<Q>,
                Q: Ord + ?Sized,
            {
                let pair = self.pair(key)?;
                // SAFETY: an initialised pair of this map.
                Some(unsafe { crate::ordered::value(self, pair) })
            }

            /// The value of a key, for changing it in place.
            #[must_use]
            pub fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
            where
                K: std::borrow::Borrow<Q>,
                Q: Ord + ?Sized,
            {
                let pair = self.pair(key)?;
                // SAFETY: an initialised pair of this map.
                Some(unsafe { crate::ordered::value_mut(self, pair) })
            }

            /// True if a key is there.
            #[must_use]
            pub fn contains_key<Q>(&self, key: &Q) -> bool
            where
                K: std::borrow::Borrow<Q>,
                Q: Ord + ?Sized,
            {
                self.pair(key).is_some()
            }

            /// Removes a key; returns its value.
            pub fn remove<Q>(&mut self, key: &Q) -> Option<V>
            where
                K: std::borrow::Borrow<Q>,
                Q: Ord + ?Sized,
            {
                self.remove_entry(key).map(|(_, value)| value)
            }
        }

        /// All pairs of a map in key order.
        #[derive(Debug)]
        pub struct $iter<'a, K, V> {
            cursor: $cursor<K, V>,
            left: usize,
            _map: PhantomData<&'a (K, V)>,
        }

        impl<'a, K, V> $iter<'a, K, V> {
            /// All pairs from the first on: `left` of them, which the caller borrows.
            fn new(cursor: $cursor<K, V>, left: usize) -> $iter<'a, K, V> {
                $iter { cursor, left, _map: PhantomData }
            }
        }

        impl<'a, K, V> Iterator for $iter<'a, K, V> {
            type Item = (&'a K, &'a V);

            fn next(&mut self) -> Option<(&'a K, &'a V)> {
                let pair = self.cursor.peek()?;
                self.cursor.step();
                self.left -= 1;
                Some(pair)
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                (self.left, Some(self.left))
            }
        }

        impl<K, V> ExactSizeIterator for $iter<'_, K, V> {}
        impl<K, V> std::iter::FusedIterator for $iter<'_, K, V> {}

        /// The pairs of a map whose keys are in a range, in key order.
        pub struct $range<'a, K, V, R, Q: ?Sized> {
            cursor: $cursor<K, V>,
            range: R,
            _map: PhantomData<&'a (K, V)>,
            _bounds: PhantomData<fn(&Q)>,
        }

        impl<'a, K, V, R, Q: ?Sized> $range<'a, K, V, R, Q> {
            /// The pairs from the cursor's on, which the caller borrows.
            fn new(cursor: $cursor<K, V>, range: R) -> $range<'a, K, V, R, Q> {
                $range { cursor, range, _map: PhantomData, _bounds: PhantomData }
            }
        }

        impl<K, V, R: std::fmt::Debug, Q: ?Sized> std::fmt::Debug for $range<'_, K, V, R, Q> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($range))
                    .field("range", &self.range)
                    .finish_non_exhaustive()
            }
        }

        impl<'a, K, V, R, Q> Iterator for $range<'a, K, V, R, Q>
        where
            K: std::borrow::Borrow<Q>,
            Q: Ord + ?Sized,
            R: std::ops::RangeBounds<Q>,
        {
            type Item = (&'a K, &'a V);

            fn next(&mut self) -> Option<(&'a K, &'a V)> {
                let (key, value) = self.cursor.peek()?;
                if crate::ordered::is_before_end(&self.range, key) {
                    self.cursor.step();
                    return Some((key, value));
                }
                self.cursor.finish();
                None
            }
        }
    };
}

/// A plain pointer to a node: copied, compared and printed as one, whatever the pairs are.
macro_rules! node_pointer {
    ($link:ident, $node:ident) => {
        /// A node, by its address.
        pub(super) struct $link<K, V>(NonNull<$node<K, V>>);

        impl<K, V> Clone for $link<K, V> {
            fn clone(&self) -> $link<K, V> {
                *self
            }
        }

        impl<K, V> Copy for $link<K, V> {}

        impl<K, V> PartialEq for $link<K, V> {
            fn eq(&self, other: &$link<K, V>) -> bool {
                self.0 == other.0
            }
        }

        impl<K, V> std::fmt::Debug for $link<K, V> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }
    };
}

pub(super) use {linked_map, map_traits, node_pointer};
