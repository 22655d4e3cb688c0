//! Ways through the tree: from the root to a pair, and from there in key order.
//!
//! A step remembers how many pairs its node has, so that going on needs no second look at nodes
//! that may have been evicted.

use super::node::Link;
use crate::ordered::MapCursor;
use std::borrow::Borrow;
use std::cmp::Ordering;

/// Maximum number of levels: a 2-3 tree of this height has more pairs than there are addresses.
pub(super) const HEIGHT_MAX: usize = 48;

/// One node on the way, and the pair or child there.
#[derive(Debug)]
pub(super) struct Step<K, V> {
    pub(super) node: Link<K, V>,
    pub(super) at: u8,
    len: u8,
}

impl<K, V> Clone for Step<K, V> {
    fn clone(&self) -> Step<K, V> {
        *self
    }
}

impl<K, V> Copy for Step<K, V> {}

/// The nodes from the root downwards.
#[derive(Debug)]
pub(super) struct Path<K, V> {
    steps: [Option<Step<K, V>>; HEIGHT_MAX],
    depth: usize,
}

impl<K, V> Clone for Path<K, V> {
    fn clone(&self) -> Path<K, V> {
        Path { steps: self.steps, depth: self.depth }
    }
}

/// Where a key is in a node: `Ok` at a pair, `Err` below a child.
pub(super) fn search<K: Borrow<Q>, V, Q: Ord + ?Sized>(
    node: Link<K, V>,
    key: &Q,
) -> Result<usize, usize> {
    let len = node.len();
    for at in 0..len {
        match key.cmp(node.key(at).borrow()) {
            Ordering::Less => return Err(at),
            Ordering::Equal => return Ok(at),
            Ordering::Greater => {}
        }
    }
    Err(len)
}

impl<K, V> Path<K, V> {
    pub(super) fn new() -> Path<K, V> {
        Path { steps: [None; HEIGHT_MAX], depth: 0 }
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn step_at(&self, at: usize) -> Step<K, V> {
        assert!(at < self.depth, "step {at} of {}", self.depth);
        self.steps[at].expect("steps below the depth are set")
    }

    pub(super) fn last(&self) -> Option<Step<K, V>> {
        self.depth.checked_sub(1).map(|at| self.step_at(at))
    }

    pub(super) fn push(&mut self, node: Link<K, V>, at: usize) {
        let len = node.len() as u8;
        self.steps[self.depth] = Some(Step { node, at: at as u8, len });
        self.depth += 1;
    }

    pub(super) fn pop(&mut self) {
        self.depth -= 1;
    }

    /// Notes that a node has moved.
    pub(super) fn moved(&mut self, old: Link<K, V>, new: Link<K, V>) {
        for step in self.steps[..self.depth].iter_mut().flatten() {
            if step.node == old {
                step.node = new;
            }
        }
    }

    /// The way to a key: whether it is there, at the last step.
    pub(super) fn find<Q>(root: Option<Link<K, V>>, key: &Q) -> (Path<K, V>, bool)
    where
        K: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        let mut path = Path::new();
        let mut next = root;
        while let Some(node) = next {
            match search(node, key) {
                Ok(at) => {
                    path.push(node, at);
                    return (path, true);
                }
                Err(at) => {
                    path.push(node, at);
                    next = (!node.is_leaf()).then(|| node.child(at));
                }
            }
        }
        (path, false)
    }

    /// The way to the first pair that `compare` does not call less; it calls a prefix of the keys
    /// less, then at most one equal. Ends at a pair that is equal, without a look below.
    pub(super) fn first(
        root: Option<Link<K, V>>,
        mut compare: impl FnMut(&K) -> Ordering,
    ) -> Path<K, V> {
        let mut path = Path::new();
        let mut next = root;
        while let Some(node) = next {
            let (mut at, mut order) = (0, Ordering::Greater);
            while at < node.len() {
                order = compare(node.key(at));
                if order != Ordering::Less {
                    break;
                }
                at += 1;
            }
            path.push(node, at);
            let ends = node.is_leaf() || (at < node.len() && order == Ordering::Equal);
            next = (!ends).then(|| node.child(at));
        }
        path.climb();
        path
    }

    /// Leaves nodes whose pairs have all been passed.
    pub(super) fn climb(&mut self) {
        while self.last().is_some_and(|step| step.at >= step.len) {
            self.pop();
        }
    }
}

impl<K, V> MapCursor<K, V> for Path<K, V> {
    fn peek<'a>(&self) -> Option<(&'a K, &'a V)>
    where
        K: 'a,
        V: 'a,
    {
        self.last().map(|step| step.node.entry(usize::from(step.at)))
    }

    fn step(&mut self) {
        let Some(step) = self.last() else { return };
        let at = usize::from(step.at) + 1;
        self.steps[self.depth - 1] = Some(Step { at: at as u8, ..step });
        // Only the node knows whether it is a leaf, and it was just read for the pair.
        let mut next = (!step.node.is_leaf()).then(|| step.node.child(at));
        while let Some(node) = next {
            self.push(node, 0);
            next = (!node.is_leaf()).then(|| node.child(0));
        }
        self.climb();
    }

    fn finish(&mut self) {
        self.depth = 0;
    }
}
