//! A graph index whose records are placed by a strategy: nearest neighbours of vectors.
//!
//! Hierarchical navigable small worlds (Malkov, Yashunin, "Efficient and Robust Approximate Nearest
//! Neighbor Search Using Hierarchical Navigable Small World Graphs", TPAMI 42(4), 2020): a search
//! descends through layers with ever more vectors, each a graph whose links lead to near ones.
//! `node` holds records, `place` decides where they live.
//!
//! Links are numbers; a table in local memory says where each record is, 16 bytes a vector. A
//! record moves by changing its entry, and a search knows where all neighbours are before it
//! touches one.
//!
//! # Invariants
//! 1. The table holds every record once; links of a layer lead to records that have that layer.
//! 2. Memory for a record is allocated before anything changes.

#![expect(unsafe_code, reason = "makes records in memory that it allocated, and frees them")]

mod node;
mod place;
mod strategy;

pub(crate) use strategy::GraphStrategy;

use farheap_collections::sub::{AllocError, Collective};
use node::{Record, Shape};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::fmt;
use std::sync::Arc;
use strategy::Watched;

/// Highest layer.
const LEVEL_MAX: u8 = 15;

/// How an index is built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphConfig {
    /// Links of a vector in each layer, at least 2; twice as many in the lowest. More give better recall and
    /// larger records.
    pub(crate) links: usize,
    /// Candidates that an insert looks at in each layer. More give a better graph.
    pub(crate) width: usize,
    /// Seed of the vectors' layers.
    pub(crate) seed: u64,
}

/// A vector that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neighbour {
    /// Squared Euclidean distance.
    pub(crate) distance: f32,
    /// The vector's number: vectors are numbered from 0 in the order of insertion.
    pub(crate) id: u32,
}

impl PartialEq for Neighbour {
    fn eq(&self, other: &Neighbour) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Neighbour {}

impl PartialOrd for Neighbour {
    fn partial_cmp(&self, other: &Neighbour) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Neighbour {
    fn cmp(&self, other: &Neighbour) -> Ordering {
        self.distance.total_cmp(&other.distance).then(self.id.cmp(&other.id))
    }
}

/// A record and its highest layer: an entry of the table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    record: Record,
    level: u8,
}

/// Vectors in far memory, found by nearness.
pub(crate) struct FarGraphIndex {
    table: Vec<Entry>,
    /// Where searches start: a record of the highest layer that there is.
    start: Option<u32>,
    shape: Shape,
    width: usize,
    dice: u64,
    strategy: GraphStrategy,
    watched: Watched,
    collective: Arc<Collective>,
}

// SAFETY: the index owns its records; the collective is shared between threads by design.
unsafe impl Send for FarGraphIndex {}
// SAFETY: `&FarGraphIndex` only reads records.
unsafe impl Sync for FarGraphIndex {}

/// Squared Euclidean distance, in eight independent sums.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            let difference = a[lane] - b[lane];
            sums[lane] += difference * difference;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| (a - b) * (a - b)).sum();
    sums.iter().sum::<f32>() + rest
}

impl FarGraphIndex {
    /// An empty index for vectors of this number of dimensions. Nothing is allocated.
    ///
    /// # Panics
    /// When `config.links` is below 2.
    #[must_use]
    pub(crate) fn new(
        collective: Arc<Collective>,
        strategy: GraphStrategy,
        dimensions: usize,
        config: GraphConfig,
    ) -> FarGraphIndex {
        assert!(config.links >= 2, "{} links do not make a graph", config.links);
        FarGraphIndex {
            table: Vec::new(),
            start: None,
            shape: Shape { dimensions, links: config.links },
            width: config.width.max(1),
            // Never zero, or xorshift would stay there.
            dice: config.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            strategy,
            watched: Watched::default(),
            collective,
        }
    }

    /// Number of vectors.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Bytes of all records: what a collective needs, without gaps at the ends of pages.
    #[must_use]
    pub(crate) fn record_bytes(&self) -> u64 {
        self.table.iter().map(|entry| self.shape.layout(entry.level).size() as u64).sum()
    }

    /// Adds a vector; returns its number.
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory for it; the index is as it was.
    ///
    /// # Panics
    /// When the vector has another number of dimensions than the index, or for vector 2^32.
    pub(crate) fn insert(&mut self, vector: &[f32]) -> Result<u32, AllocError> {
        assert_eq!(vector.len(), self.shape.dimensions, "dimensions of the vector");
        let id = u32::try_from(self.table.len()).expect("fewer than 2^32 vectors");
        let level = self.roll_level();
        let chosen = self.choose_links(vector, level);
        let nearest = chosen.first().and_then(|links| links.first().copied());
        let memory = self.place(level, nearest)?;
        // SAFETY: just allocated for a record of this level.
        let record = unsafe { Record::create(memory, self.shape, level, vector) };
        self.table.push(Entry { record, level });
        for (layer, links) in (0_u8..).zip(&chosen) {
            record.set_links(self.shape, layer, links);
            for other in links {
                self.link_back(*other, id, layer);
            }
        }
        if self.start.is_none_or(|start| self.entry(start).level < level) {
            self.start = Some(id);
        }
        Ok(id)
    }

    /// The `count` nearest vectors that a search finds which keeps `width` candidates (at least
    /// `count`), nearest first. More candidates find more of the true neighbours.
    ///
    /// # Panics
    /// When the vector has another number of dimensions than the index.
    #[must_use]
    pub(crate) fn search(&self, vector: &[f32], count: usize, width: usize) -> Vec<Neighbour> {
        self.search_noting(vector, count, width, &mut |_, _| ())
    }

    fn search_noting(
        &self,
        vector: &[f32],
        count: usize,
        width: usize,
        note: &mut impl FnMut(u32, u32),
    ) -> Vec<Neighbour> {
        assert_eq!(vector.len(), self.shape.dimensions, "dimensions of the vector");
        let Some(start) = self.start else { return Vec::new() };
        let near = self.descend(vector, start, 0, note);
        let mut found = self.search_layer(vector, near, width.max(count), 0, note);
        found.truncate(count);
        found
    }

    fn entry(&self, id: u32) -> Entry {
        self.table[id as usize]
    }

    fn measure(&self, vector: &[f32], id: u32) -> Neighbour {
        Neighbour { distance: distance(vector, self.entry(id).record.vector(self.shape)), id }
    }

    /// Layers of the next record: one more with probability 1 / `links` each.
    fn roll_level(&mut self) -> u8 {
        let mut level = 0;
        loop {
            // xorshift64.
            self.dice ^= self.dice << 13;
            self.dice ^= self.dice >> 7;
            self.dice ^= self.dice << 17;
            let more = (self.dice >> 11).is_multiple_of(self.shape.links as u64);
            if !more || level == LEVEL_MAX {
                return level;
            }
            level += 1;
        }
    }

    /// Walks from `start` to ever nearer records, in its highest layer and those below, down to the
    /// one above `layer`.
    fn descend(
        &self,
        vector: &[f32],
        start: u32,
        layer: u8,
        note: &mut impl FnMut(u32, u32),
    ) -> Neighbour {
        let mut near = self.measure(vector, start);
        for above in (layer + 1..=self.entry(start).level).rev() {
            loop {
                let links = self.entry(near.id).record.links(self.shape, above);
                let here = near.id;
                links.iter().for_each(|id| note(here, *id));
                let nearest = links.iter().map(|id| self.measure(vector, *id)).min();
                match nearest.filter(|nearest| *nearest < near) {
                    Some(nearest) => near = nearest,
                    None => break,
                }
            }
        }
        near
    }

    /// The `width` nearest records that links of a layer lead to, nearest first.
    fn search_layer(
        &self,
        vector: &[f32],
        from: Neighbour,
        width: usize,
        layer: u8,
        note: &mut impl FnMut(u32, u32),
    ) -> Vec<Neighbour> {
        let mut seen = vec![0_u64; self.table.len().div_ceil(64)];
        let mut mark = |id: u32| {
            let (word, bit) = (&mut seen[id as usize / 64], 1 << (id % 64));
            let is_new = *word & bit == 0;
            *word |= bit;
            is_new
        };
        mark(from.id);
        let mut open = BinaryHeap::from([Reverse(from)]);
        let mut best = BinaryHeap::from([from]);
        while let Some(Reverse(near)) = open.pop() {
            if best.len() >= width && best.peek().is_some_and(|worst| near > *worst) {
                break;
            }
            for id in self.entry(near.id).record.links(self.shape, layer) {
                if !mark(*id) {
                    continue;
                }
                note(near.id, *id);
                let found = self.measure(vector, *id);
                if best.len() < width || best.peek().is_some_and(|worst| found < *worst) {
                    open.push(Reverse(found));
                    best.push(found);
                    if best.len() > width {
                        best.pop();
                    }
                }
            }
        }
        best.into_sorted_vec()
    }

    /// The links of a new record, for each of its layers from the lowest up.
    fn choose_links(&self, vector: &[f32], level: u8) -> Vec<Vec<u32>> {
        let Some(start) = self.start else { return Vec::new() };
        let top = level.min(self.entry(start).level);
        let mut near = self.descend(vector, start, top, &mut |_, _| ());
        let mut chosen = Vec::with_capacity(usize::from(top) + 1);
        for layer in (0..=top).rev() {
            let found = self.search_layer(vector, near, self.width, layer, &mut |_, _| ());
            near = found[0];
            chosen.push(self.select(&found, self.shape.links));
        }
        chosen.reverse();
        chosen
    }

    /// Up to `most` of the candidates, which are given nearest first: those that are nearer to the
    /// new record than to one chosen before, so that links lead in all directions; then the rest.
    fn select(&self, candidates: &[Neighbour], most: usize) -> Vec<u32> {
        let (mut chosen, mut rest): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
        for candidate in candidates {
            if chosen.len() == most {
                break;
            }
            let vector = self.entry(candidate.id).record.vector(self.shape);
            let apart = |other: &u32| self.measure(vector, *other).distance > candidate.distance;
            let list = if chosen.iter().all(apart) { &mut chosen } else { &mut rest };
            list.push(candidate.id);
        }
        let room = most - chosen.len();
        chosen.extend(rest.into_iter().take(room));
        chosen
    }

    /// Adds a link from a record to a new one; a full list keeps the best.
    fn link_back(&mut self, from: u32, to: u32, layer: u8) {
        let (shape, record) = (self.shape, self.entry(from).record);
        let most = shape.links_max(layer);
        let mut links = record.links(shape, layer).to_vec();
        links.push(to);
        if links.len() > most {
            let vector = record.vector(shape);
            let mut near: Vec<Neighbour> =
                links.iter().map(|id| self.measure(vector, *id)).collect();
            near.sort_unstable();
            links = self.select(&near, most);
        }
        record.set_links(shape, layer, &links);
    }
}

impl Drop for FarGraphIndex {
    fn drop(&mut self) {
        // The last user of a collective drops all pages at once.
        if Arc::get_mut(&mut self.collective).is_none() {
            for Entry { record, level } in std::mem::take(&mut self.table) {
                self.free(record, level);
            }
        }
    }
}

impl fmt::Debug for FarGraphIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FarGraphIndex")
            .field("len", &self.table.len())
            .field("dimensions", &self.shape.dimensions)
            .field("strategy", &self.strategy)
            .finish_non_exhaustive()
    }
}
