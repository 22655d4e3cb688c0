//! What an allocation costs in each sub-allocator, against the far heap's own and jemalloc.
//!
//! Objects are allocated in a row and freed in another order, as a container's nodes are. The far
//! heap and the collectives have room for everything: nothing faults but for fresh pages, and those
//! are touched before the clock starts.
#![expect(unsafe_code, reason = "allocates by hand")]

use crate::run::Outcome;
use farheap::store::MemStore;
use farheap::{ByteCount, FarHeap, Heap, Scope, Tier};
use farheap_collections::sub::{AllocError, Collective, CollectiveConfig, PerPage, SubAllocator};
use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

static HEAP: FarHeap = FarHeap::new();

/// Rounds of each work and allocator, in turns.
const ROUNDS: usize = 7;
/// Objects alive at once.
const OBJECTS: usize = 20_000;
/// Sizes of objects: small ones, the list's nodes, the tree's.
const SIZES: [usize; 3] = [32, 192, 352];

/// Where objects come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Jemalloc,
    FarHeap,
    PurelyLocal,
    PerPage,
    Swappable,
    HintOnly,
}

const SOURCES: [Source; 6] = [
    Source::Jemalloc,
    Source::FarHeap,
    Source::PurelyLocal,
    Source::PerPage,
    Source::Swappable,
    Source::HintOnly,
];

/// A source's cost for a size.
pub(crate) struct Cost {
    source: Source,
    size: usize,
    /// Nanoseconds per allocation and its free.
    ns: f64,
    /// The same of jemalloc and of the far heap, in the same rounds.
    jemalloc_ns: f64,
    far_ns: f64,
}

/// Measures all; `None` where userfaultfd is not permitted.
pub(crate) fn measure(quick: bool) -> Outcome<Option<Vec<Cost>>> {
    let heap = match Heap::builder().far_limit(ByteCount::gib(1)).start() {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(None);
        }
    };
    let room = ByteCount::mib(64);
    let region = CollectiveConfig::default_region().limit(room);
    let config = CollectiveConfig::new().local(room).region(region);
    let collective = Collective::create(config, Arc::new(MemStore::new(room)?))?;
    let (rounds, count) = if quick { (1, 500) } else { (ROUNDS, OBJECTS) };
    let mut costs = Vec::new();
    for size in SIZES {
        let layout = Layout::from_size_align(size, 16)?;
        let mut times = vec![Vec::new(); SOURCES.len()];
        // One round to touch the pages.
        for round in 0..=rounds {
            for (source, times) in SOURCES.into_iter().zip(&mut times) {
                let ns = run(&collective, source, layout, count)?;
                if round > 0 {
                    times.push(ns);
                }
            }
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        costs.extend(SOURCES.into_iter().zip(&medians).map(|(source, ns)| {
            let (jemalloc_ns, far_ns) = (medians[0], medians[1]);
            Cost { source, size, ns: *ns, jemalloc_ns, far_ns }
        }));
    }
    heap.shutdown()?;
    Ok(Some(costs))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds per allocation and its free.
fn run(collective: &Collective, source: Source, layout: Layout, count: usize) -> Outcome<f64> {
    let mut objects = Vec::with_capacity(count);
    let _scope = Scope::enter(if source == Source::FarHeap { Tier::FAR } else { Tier::LOCAL });
    let began = Instant::now();
    let mut page = None;
    for _ in 0..count {
        let object = allocate(collective, source, layout, &mut page)?;
        // SAFETY: allocated with a layout that is larger than a word.
        unsafe { object.as_ptr().cast::<u64>().write(objects.len() as u64) };
        objects.push(object);
    }
    drop(page);
    // An odd step visits all objects of a count that it does not divide, in no order of memory.
    let mut at = 0;
    for _ in 0..count {
        at = (at + 7_919) % count;
        free(collective, source, layout, objects[at]);
    }
    Ok(began.elapsed().as_nanos() as f64 / count as f64)
}

fn allocate<'a>(
    collective: &'a Collective,
    source: Source,
    layout: Layout,
    page: &mut Option<PerPage<'a>>,
) -> Outcome<NonNull<u8>> {
    Ok(match source {
        Source::Jemalloc => {
            // SAFETY: any size is allowed.
            let object = unsafe { tikv_jemalloc_sys::malloc(layout.size()) };
            NonNull::new(object.cast()).ok_or("out of memory")?
        }
        Source::FarHeap => {
            // SAFETY: the layout is not empty.
            let object = unsafe { HEAP.alloc(layout) };
            NonNull::new(object).ok_or("out of memory")?
        }
        Source::PurelyLocal => collective.purely_local().allocate(layout)?,
        Source::PerPage => {
            if let Some(page) = page.as_ref() {
                match page.allocate(layout) {
                    Err(AllocError::Full) => {}
                    done => return Ok(done?),
                }
            }
            page.insert(collective.new_page()?).allocate(layout)?
        }
        Source::Swappable => collective.swappable().allocate(layout)?,
        Source::HintOnly => collective.hint_only().allocate(layout, None)?,
    })
}

fn free(collective: &Collective, source: Source, layout: Layout, object: NonNull<u8>) {
    match source {
        // SAFETY: from jemalloc, with this size.
        Source::Jemalloc => unsafe {
            tikv_jemalloc_sys::sdallocx(object.as_ptr().cast(), layout.size(), 0);
        },
        // SAFETY: from the heap, with this layout.
        Source::FarHeap => unsafe { HEAP.dealloc(object.as_ptr(), layout) },
        // SAFETY: from the collective, with this layout, freed once.
        _ => unsafe { collective.deallocate(object, layout) },
    }
}

/// Prints the costs.
pub(crate) fn print(costs: &[Cost]) {
    println!("\n| allocate and free | size | ns | of the far heap's | of jemalloc's |");
    println!("|---|---:|---:|---:|---:|");
    for Cost { source, size, ns, jemalloc_ns, far_ns } in costs {
        let (far, bare) = (ns / far_ns, ns / jemalloc_ns);
        println!("| {source:?} | {size} | {ns:.1} | {far:.2} | {bare:.2} |");
    }
}

/// The costs as lines of `placement.csv`.
pub(crate) fn csv(costs: &[Cost]) -> String {
    let line = |cost: &Cost| {
        let Cost { source, size, ns, far_ns, .. } = cost;
        let ratio = far_ns / ns;
        format!("{source:?} allocate and free {size},{ns:.1},ns,far heap,{far_ns:.1},{ratio:.3},\n")
    };
    costs.iter().map(line).collect()
}
