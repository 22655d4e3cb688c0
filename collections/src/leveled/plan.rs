//! Which page size each level of a tree should have, from what a fault costs and how it is used.
//!
//! A scan of `s` pairs reads `1 + (s - 1) / capacity` leaves. Larger leaves are fewer faults and
//! more bytes; with long scans the fault's fixed cost decides, with short ones the bytes do. Levels
//! above the leaves cost local memory, which the page cache then lacks, or faults where local memory
//! does not suffice. The model asks for every key equally often: a map whose hot keys lie together
//! is read less often than it says, at any page size.

use super::node::Node;
use crate::pairs::Shape;
use crate::sub::{AllocError, Collective};
use crate::{FarPagedMap, Refused};
use farheap::ByteCount;
use farheap::region::RegionConfig;
use std::sync::Arc;
use std::time::Instant;

/// Page sizes that are tried, in KiB.
const PAGES_KIB: [u64; 7] = [4, 8, 16, 32, 64, 128, 256];
/// Bytes that a measurement spreads its faults over: more than processors cache, and eight times its
/// page cache.
const FOOTPRINT: usize = 64 << 20;
/// Pages that a measurement faults in, of each size.
const PROBES: usize = 256;
/// Rounds of a measurement; the fastest counts.
const ROUNDS: usize = 3;
/// Page sizes that are measured, in KiB.
const MEASURED_KIB: [u64; 2] = [4, 64];

/// Nodes of each level, leaves first, when leaves hold `most` pairs and the nodes above are full.
pub(super) fn level_counts(
    pairs: usize,
    most: usize,
    capacity: impl Fn(usize) -> usize,
) -> Vec<usize> {
    let mut counts = Vec::new();
    let mut nodes = pairs.div_ceil(most);
    while nodes > 0 {
        counts.push(nodes);
        if nodes == 1 {
            break;
        }
        nodes = nodes.div_ceil(capacity(counts.len()));
    }
    counts
}

/// Nodes of each level above full leaves; `None` for pairs that do not fit into the page.
pub(super) fn directory<K, V>(
    pairs: usize,
    leaf_page: ByteCount,
    page: ByteCount,
) -> Option<Vec<usize>> {
    let leaf = Shape::new::<K, V>(leaf_page.as_usize())?;
    let above = Shape::new::<K, Node<K, V>>(page.as_usize())?;
    let counts = level_counts(pairs, leaf.capacity, |_| above.capacity);
    Some(counts.into_iter().skip(1).collect())
}

/// Cost of bringing in a page, or to write one back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultCost {
    /// Nanoseconds for a page, whatever its size.
    pub page_ns: f64,
    /// Nanoseconds for each byte of it.
    pub byte_ns: f64,
}

impl FaultCost {
    /// Measures faults while the page cache is full, so that each makes a page leave: `make` gives a
    /// collective with pages of the size asked for, over a store like the one that will be used, for
    /// at least 128 MiB of far memory. Its limit is lowered. Writes 64 MiB, and takes some thousand
    /// faults of 4 KiB and some hundred of 64 KiB.
    ///
    /// # Errors
    /// As `make`, and as eviction when the store fails.
    pub fn measure<E: From<AllocError>>(
        mut make: impl FnMut(ByteCount) -> Result<Arc<Collective>, E>,
    ) -> Result<FaultCost, E> {
        let mut ns = [0.0; MEASURED_KIB.len()];
        for (ns, kib) in ns.iter_mut().zip(MEASURED_KIB) {
            *ns = fault_ns(make(ByteCount::kib(kib))?)?;
        }
        let [small, large] = MEASURED_KIB.map(|kib| ByteCount::kib(kib).get() as f64);
        let byte_ns = ((ns[1] - ns[0]) / (large - small)).max(0.0);
        Ok(FaultCost { page_ns: (ns[0] - byte_ns * small).max(0.0), byte_ns })
    }

    /// Nanoseconds for a page of a size.
    #[must_use]
    pub fn of(&self, page: ByteCount) -> f64 {
        self.page_ns + self.byte_ns * page.get() as f64
    }
}

/// Nanoseconds of a fault in a collective whose page cache is full, next to which the rest of a
/// lookup is small.
fn fault_ns(collective: Arc<Collective>) -> Result<f64, AllocError> {
    let (region, page) = (collective.region(), collective.page_size());
    let mut map = FarPagedMap::<u64, [u64; 31]>::new(collective.clone())?;
    let capacity = map.leaf_capacity();
    let leaves = FOOTPRINT / collective.page_size().as_usize();
    for key in 0..(leaves * capacity) as u64 {
        map.insert(key, [!key; 31]).map_err(|Refused { error, .. }| error)?;
    }
    region.evict_all()?;
    // While there is room a fault takes fresh memory for the page, and no page leaves.
    let cache = RegionConfig::LIMIT_MIN.max(ByteCount((FOOTPRINT / 8) as u64));
    region.set_limit(ByteCount(cache.get() + collective.stats().metadata_bytes.get()))?;
    // An odd step visits other leaves each time, far apart: nothing is read ahead.
    let keys = (0..leaves).map(|probe| (probe * 389 % leaves * capacity) as u64);
    let mut keys = keys.cycle();
    let mut probe = |count: usize| -> f64 {
        let (before, began) = (collective.stats().pages_in, Instant::now());
        for key in keys.by_ref().take(count) {
            assert_eq!(map.get(&key), Some(&[!key; 31]), "a page comes back as it went");
        }
        let bytes = (collective.stats().pages_in - before) * 4096;
        let pages = (bytes / page.get()).max(1);
        began.elapsed().as_nanos() as f64 / pages as f64
    };
    probe((cache.get() / page.get()) as usize);
    Ok((0..ROUNDS).map(|_| probe(PROBES)).fold(f64::INFINITY, f64::min))
}

/// Expected content and use of a map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Pairs in the map.
    pub pairs: usize,
    /// Pairs that a read goes over, on average; 1 for lookups.
    pub pairs_per_read: f64,
    /// Share of operations that change a value, 0 to 1.
    pub update_share: f64,
    /// Bytes of local memory, for the levels above the leaves and for all page caches.
    pub local: ByteCount,
}

/// Page sizes for the levels of a [`FarLeveledMap`](super::FarLeveledMap), and where its local
/// memory goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelPlan {
    /// Page size of the leaves.
    pub leaf_page: ByteCount,
    /// Page size of the levels above them.
    pub page: ByteCount,
    /// Purely-local memory for the levels above the leaves.
    pub directory: ByteCount,
    /// Page cache of the leaves.
    pub cache: ByteCount,
    /// Page cache of those levels above the leaves that are far; added to that of the leaves when
    /// both have pages of one size and live in one collective.
    pub directory_cache: ByteCount,
    /// Expected time of an operation, in nanoseconds.
    pub op_ns: f64,
    /// Bytes that an operation is expected to read and write.
    pub op_bytes: f64,
}

impl LevelPlan {
    /// The plan that costs least, of all page sizes from 4 to 256 KiB for leaves and for the levels
    /// above.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] when not even two pairs fit into the largest page.
    pub fn choose<K, V>(workload: Workload, cost: FaultCost) -> Result<LevelPlan, AllocError> {
        let pages = || PAGES_KIB.into_iter().map(ByteCount::kib);
        let size = 2 * (size_of::<K>() + size_of::<V>());
        let max = PAGES_KIB[PAGES_KIB.len() - 1] as usize * 1024;
        let fits = |page: &ByteCount| Shape::new::<K, V>(page.as_usize()).is_some();
        pages().find(fits).ok_or(AllocError::TooLarge { size, max })?;
        // With less no region starts.
        let workload = Workload { local: workload.local.max(RegionConfig::LIMIT_MIN), ..workload };
        let plans = pages().flat_map(|leaf| {
            pages()
                .filter_map(move |page| LevelPlan::with_pages::<K, V>(workload, cost, leaf, page))
        });
        plans.min_by(|a, b| a.op_ns.total_cmp(&b.op_ns)).ok_or(AllocError::TooLarge { size, max })
    }

    /// The plan for given page sizes; `None` for pages in which not even two pairs fit, or whose
    /// least page caches are more than the local memory.
    #[must_use]
    pub fn with_pages<K, V>(
        workload: Workload,
        cost: FaultCost,
        leaf_page: ByteCount,
        page: ByteCount,
    ) -> Option<LevelPlan> {
        let capacity = Shape::new::<K, V>(leaf_page.as_usize())?.capacity;
        let above = directory::<K, V>(workload.pairs, leaf_page, page)?;
        let least = RegionConfig::LIMIT_MIN.get();
        let mut left = workload.local.get().checked_sub(least)?;
        let (mut local, mut far, mut far_levels) = (0, 0, 0.0);
        for nodes in above.iter().rev() {
            let bytes = *nodes as u64 * page.get();
            if far == 0 && bytes <= left {
                (local, left) = (local + bytes, left - bytes);
            } else {
                (far, far_levels) = (far + bytes, far_levels + 1.0);
            }
        }
        // A page above the leaves is asked for more often than a leaf: it stays in the cache. Pages
        // of one size can have one cache.
        let alone = if page == leaf_page { 0 } else { RegionConfig::LIMIT_MIN.get() };
        let directory_cache = if far == 0 { 0 } else { far.min(left / 2).max(alone) };
        left = left.checked_sub(directory_cache)?;
        let cache = least + left;
        let share = |cache: u64, bytes: u64| 1.0 - (cache as f64 / bytes.max(1) as f64).min(1.0);
        let leaf_bytes = workload.pairs.div_ceil(capacity) as u64 * leaf_page.get();
        let updates = workload.update_share.clamp(0.0, 1.0);
        let per_read = 1.0 + (workload.pairs_per_read.max(1.0) - 1.0) / capacity as f64;
        // An update reads a leaf and writes it back.
        let touched = (1.0 - updates) * per_read + updates * 2.0;
        let leaves = touched * share(cache, leaf_bytes);
        let upper = far_levels * share(directory_cache, far);
        Some(LevelPlan {
            leaf_page,
            page,
            directory: ByteCount(local),
            cache: ByteCount(cache),
            directory_cache: ByteCount(directory_cache),
            op_ns: leaves * cost.of(leaf_page) + upper * cost.of(page),
            op_bytes: leaves * leaf_page.get() as f64 + upper * page.get() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Value = [u8; 150];

    const DISK: FaultCost = FaultCost { page_ns: 80_000.0, byte_ns: 0.5 };
    const MEMORY: FaultCost = FaultCost { page_ns: 3_000.0, byte_ns: 0.5 };

    fn workload(pairs_per_read: f64) -> Workload {
        let local = ByteCount::mib(100);
        Workload { pairs: 1 << 20, pairs_per_read, update_share: 0.05, local }
    }

    fn choose(pairs_per_read: f64, cost: FaultCost) -> LevelPlan {
        LevelPlan::choose::<u64, Value>(workload(pairs_per_read), cost).expect("pairs fit")
    }

    #[test]
    fn longer_scans_and_dearer_faults_take_larger_leaves() {
        let pages = [1.0, 50.0, 5_000.0].map(|scan| choose(scan, DISK).leaf_page);
        assert!(pages.is_sorted() && pages[0] < pages[2], "{pages:?}");
        assert_eq!(choose(1.0, MEMORY).leaf_page, ByteCount::kib(4));
        assert!(choose(50.0, DISK).leaf_page > choose(50.0, MEMORY).leaf_page);
    }

    #[test]
    fn a_choice_is_no_worse_than_any_pages() {
        for scan in [1.0, 50.0, 5_000.0] {
            let best = choose(scan, DISK);
            for (leaf, page) in PAGES_KIB.into_iter().zip(PAGES_KIB.into_iter().rev()) {
                let (leaf, page) = (ByteCount::kib(leaf), ByteCount::kib(page));
                let other = LevelPlan::with_pages::<u64, Value>(workload(scan), DISK, leaf, page);
                assert!(best.op_ns <= other.expect("pairs fit").op_ns, "{best:?} {other:?}");
            }
        }
    }

    #[test]
    fn upper_levels_stay_local_when_local_memory_is_short() {
        let page = ByteCount::kib(4);
        let plan = |local| {
            let workload = Workload { pairs: 100 << 20, local, ..workload(1.0) };
            LevelPlan::with_pages::<u64, Value>(workload, DISK, page, page).expect("pairs fit")
        };
        let all = directory::<u64, Value>(100 << 20, page, page).expect("pairs fit");
        let [lower, upper @ ..] = &all[..] else { panic!("levels above the leaves") };
        let upper: usize = upper.iter().sum();
        let short = plan(ByteCount::mib(20));
        assert_eq!(short.directory.get(), upper as u64 * 4096, "{lower} nodes below them are far");
        assert!(short.op_ns > plan(ByteCount::gib(1)).op_ns);
        let whole = plan(ByteCount::gib(1)).directory.get();
        assert_eq!(whole, (lower + upper) as u64 * 4096);
    }

    #[test]
    fn levels_are_counted_up_to_one_root() {
        assert_eq!(level_counts(0, 25, |_| 170), Vec::<usize>::new());
        assert_eq!(level_counts(25, 25, |_| 170), [1]);
        assert_eq!(level_counts(26, 25, |_| 170), [2, 1]);
        assert_eq!(level_counts(25 * 171, 25, |_| 170), [171, 2, 1]);
    }

    #[test]
    fn values_that_fit_no_page_twice_have_no_plan() {
        let error = LevelPlan::choose::<u64, [u8; 200 << 10]>(workload(1.0), DISK).err();
        assert!(matches!(error, Some(AllocError::TooLarge { .. })), "{error:?}");
    }
}
