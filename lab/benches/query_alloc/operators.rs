//! What queries do: hash joins, group-bys and materialisations that allocate as a query engine's.
//!
//! Tuples are materialised in chunks that grow from 32 to 512 KiB, small tables are pre-aggregated in
//! 32 KiB, and hash tables chain through an array of buckets that is allocated whole. Every operator
//! checks its answer.
#![expect(unsafe_code, reason = "allocates by hand")]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Words of the first and of the largest chunk, and of a pre-aggregation.
const CHUNK_FIRST: usize = (32 << 10) / 8;
const CHUNK_LAST: usize = (512 << 10) / 8;
const PRE_AGGREGATED: usize = (32 << 10) / 8;

/// What the keys of a group-by differ by from row to row.
const STEP: u64 = 0x5851_F42D;

/// Partitions of a group-by.
const PARTITIONS: usize = 8;

/// Upper ends of the classes that allocations are counted in, in bytes; the last has none.
pub(crate) const CLASSES: [usize; 4] = [32 << 10, 128 << 10, 512 << 10, 2 << 20];

/// An engine's memory: an allocator, and what is requested of it.
pub(crate) struct Memory<A> {
    alloc: A,
    requested: AtomicU64,
    classes: [AtomicU64; CLASSES.len() + 1],
    class_bytes: [AtomicU64; CLASSES.len() + 1],
}

impl<A: GlobalAlloc> Memory<A> {
    pub(crate) fn new(alloc: A) -> Memory<A> {
        let [classes, class_bytes] = [(); 2].map(|()| [const { AtomicU64::new(0) }; _]);
        Memory { alloc, requested: AtomicU64::new(0), classes, class_bytes }
    }

    /// Bytes that are allocated at the moment.
    pub(crate) fn requested(&self) -> u64 {
        self.requested.load(Relaxed)
    }

    /// Allocations so far, by the classes of their sizes.
    pub(crate) fn classes(&self) -> Vec<u64> {
        self.classes.iter().map(|count| count.load(Relaxed)).collect()
    }

    /// Their bytes.
    pub(crate) fn class_bytes(&self) -> Vec<u64> {
        self.class_bytes.iter().map(|bytes| bytes.load(Relaxed)).collect()
    }

    /// Words, all zero, or not written yet.
    fn words(&self, len: usize, zeroed: bool) -> Words<'_, A> {
        let layout = Layout::array::<u64>(len).expect("a small array");
        let class = CLASSES.iter().position(|end| layout.size() < *end).unwrap_or(CLASSES.len());
        self.classes[class].fetch_add(1, Relaxed);
        self.class_bytes[class].fetch_add(layout.size() as u64, Relaxed);
        self.requested.fetch_add(layout.size() as u64, Relaxed);
        let ptr = if zeroed {
            // SAFETY: no array here is empty.
            unsafe { self.alloc.alloc_zeroed(layout) }
        } else {
            // SAFETY: as above.
            unsafe { self.alloc.alloc(layout) }
        };
        assert!(!ptr.is_null(), "out of memory");
        Words { memory: self, ptr: ptr.cast(), len }
    }
}

/// An array; freed when dropped.
struct Words<'a, A: GlobalAlloc> {
    memory: &'a Memory<A>,
    ptr: *mut u64,
    len: usize,
}

impl<A: GlobalAlloc> Words<'_, A> {
    /// Words that have been written.
    fn part(&mut self, from: usize, len: usize) -> &mut [u64] {
        assert!(from + len <= self.len, "{from} + {len} words of {}", self.len);
        // SAFETY: inside of the array.
        let first = unsafe { self.ptr.add(from) };
        // SAFETY: the array is ours and borrowed exclusively; the callers have written these words.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }

    fn write(&mut self, from: usize, words: &[u64]) {
        assert!(from + words.len() <= self.len, "{from} + {} words of {}", words.len(), self.len);
        // SAFETY: inside of the array, which is ours.
        let to = unsafe { self.ptr.add(from) };
        // SAFETY: as above; the words are others.
        unsafe { to.copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    }
}

impl<A: GlobalAlloc> std::ops::Deref for Words<'_, A> {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        // SAFETY: ours; only arrays that were zeroed are used as a whole.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<A: GlobalAlloc> std::ops::DerefMut for Words<'_, A> {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<A: GlobalAlloc> Drop for Words<'_, A> {
    fn drop(&mut self) {
        let layout = Layout::array::<u64>(self.len).expect("allocated with it");
        // SAFETY: allocated in `words` with this layout.
        unsafe { self.memory.alloc.dealloc(self.ptr.cast(), layout) };
        self.memory.requested.fetch_sub(layout.size() as u64, Relaxed);
    }
}

/// Tuples of `N` words, in chunks that grow.
struct Tuples<'a, A: GlobalAlloc, const N: usize> {
    memory: &'a Memory<A>,
    chunks: Vec<Words<'a, A>>,
    /// Tuples in the last chunk.
    filled: usize,
}

impl<'a, A: GlobalAlloc, const N: usize> Tuples<'a, A, N> {
    fn new(memory: &'a Memory<A>) -> Self {
        Tuples { memory, chunks: Vec::new(), filled: 0 }
    }

    /// Adds a tuple; its number.
    fn push(&mut self, tuple: [u64; N]) -> u64 {
        let room = self.chunks.last().map_or(0, |chunk| chunk.len / N);
        if self.filled == room {
            let len = CHUNK_FIRST << self.chunks.len().min(8);
            self.chunks.push(self.memory.words(len.min(CHUNK_LAST), false));
            self.filled = 0;
        }
        let last = self.chunks.len() - 1;
        self.chunks[last].write(self.filled * N, &tuple);
        self.filled += 1;
        (last << 32 | (self.filled - 1)) as u64
    }

    fn get(&mut self, number: u64) -> &mut [u64] {
        let (chunk, at) = ((number >> 32) as usize, number as u32 as usize);
        self.chunks[chunk].part(at * N, N)
    }

    fn for_each(&mut self, mut each: impl FnMut(&[u64])) {
        for chunk in 0..self.chunks.len() {
            let all = self.in_chunk(chunk);
            self.chunks[chunk].part(0, all * N).chunks_exact(N).for_each(&mut each);
        }
    }

    /// How many tuples a chunk has.
    fn in_chunk(&self, chunk: usize) -> usize {
        if chunk + 1 == self.chunks.len() { self.filled } else { self.chunks[chunk].len / N }
    }
}

fn hash(key: u64) -> usize {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) as usize
}

/// Joins `rows` rows with twice as many, of which half find one.
pub(crate) fn join(memory: &Memory<impl GlobalAlloc>, rows: u64) {
    let mut built = Tuples::<_, 3>::new(memory);
    for row in 0..rows {
        built.push([2 * row, 3 * row + 1, 0]);
    }
    let mut buckets = memory.words((rows as usize).next_power_of_two(), true);
    let mask = buckets.len() - 1;
    for chunk in 0..built.chunks.len() {
        for at in 0..built.in_chunk(chunk) {
            let tuple = built.chunks[chunk].part(at * 3, 3);
            let bucket = &mut buckets[hash(tuple[0]) & mask];
            tuple[2] = *bucket;
            *bucket = (chunk << 32 | at) as u64 + 1; // 0 is the end of a chain.
        }
    }
    let mut sum = 0;
    for key in 0..2 * rows {
        let mut next = buckets[hash(key) & mask];
        while next > 0 {
            let tuple = built.get(next - 1);
            if tuple[0] == key {
                sum += tuple[1];
            }
            next = tuple[2];
        }
    }
    assert_eq!(sum, (0..rows).map(|row| 3 * row + 1).sum::<u64>(), "a join of {rows} rows");
}

/// Groups `rows` rows into `groups`, which divide them.
pub(crate) fn group_by(memory: &Memory<impl GlobalAlloc>, rows: u64, groups: u64) {
    let rows = rows.next_multiple_of(groups);
    // Counts of the groups seen last: key + 1, count. What has to go goes to its partition.
    let mut ahead = memory.words(PRE_AGGREGATED, true);
    let mut parts: Vec<_> = (0..PARTITIONS).map(|_| Tuples::<_, 2>::new(memory)).collect();
    let slots = ahead.len() / 2;
    for row in 0..rows {
        let key = row * STEP % groups;
        let slot = hash(key) % slots * 2;
        if ahead[slot] != key + 1 {
            if ahead[slot] > 0 {
                let old = [ahead[slot] - 1, ahead[slot + 1]];
                parts[old[0] as usize % PARTITIONS].push(old);
            }
            (ahead[slot], ahead[slot + 1]) = (key + 1, 0);
        }
        ahead[slot + 1] += 1;
    }
    for slot in (0..slots).map(|slot| slot * 2).filter(|slot| ahead[*slot] > 0) {
        let old = [ahead[slot] - 1, ahead[slot + 1]];
        parts[old[0] as usize % PARTITIONS].push(old);
    }
    drop(ahead);
    let (mut found, mut counted) = (0, 0);
    for mut part in parts {
        let mut merged = Tuples::<_, 3>::new(memory);
        let mut buckets =
            memory.words((groups as usize / PARTITIONS + 1).next_power_of_two(), true);
        let mask = buckets.len() - 1;
        part.for_each(|partial| {
            let bucket = &mut buckets[hash(partial[0]) & mask];
            let mut next = *bucket;
            while next > 0 {
                let group = merged.get(next - 1);
                if group[0] == partial[0] {
                    group[1] += partial[1];
                    return;
                }
                next = group[2];
            }
            *bucket = merged.push([partial[0], partial[1], *bucket]) + 1;
        });
        merged.for_each(|group| {
            found += 1;
            counted += group[1];
        });
    }
    // What the keys have in common with the number of groups, they miss.
    let (mut common, mut rest) = (groups, STEP);
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    assert_eq!((found, counted), (groups / common, rows), "{rows} rows in {groups} groups");
}

/// Materialises rows, and reads them.
pub(crate) fn materialise(memory: &Memory<impl GlobalAlloc>, rows: u64) {
    let mut tuples = Tuples::<_, 2>::new(memory);
    for row in 0..rows {
        tuples.push([row, row ^ 1]);
    }
    let mut sum = 0_u64;
    tuples.for_each(|tuple| sum = sum.wrapping_add(tuple[0] ^ tuple[1]));
    assert_eq!(sum, rows, "{rows} rows materialised");
}
