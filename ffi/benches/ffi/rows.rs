//! The rows: which loop of `side.cpp` does what, and the same from Rust.

#![expect(unsafe_code, reason = "frees what it allocates")]

use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::{ByteCount, Far, Heap, PageId, Tier, malloc};
use farheap_collections::sub::{Collective, CollectiveConfig, SubAllocator};
use std::alloc::Layout;
use std::hint::black_box;
use std::ptr;
use std::sync::Arc;

/// One side of a row: makes that many calls and returns a number to check.
type Side<'a> = dyn Fn(u64) -> u64 + 'a;

/// A row: the same calls from C or C++ and from Rust.
pub(crate) struct Pair<'a> {
    pub(crate) name: &'static str,
    pub(crate) goal: Goal,
    /// The loop of `side.cpp`.
    pub(crate) foreign: &'static str,
    pub(crate) own: Box<Side<'a>>,
}

/// What the other side may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// Calls of 2 ns more.
    Calls(u32),
    /// A multiple of the cost.
    Times(f64),
}

/// What the Rust side works on.
pub(crate) struct World {
    _heap: Heap,
    pool: Arc<BufferPool>,
    page: PageId,
    collective: Collective,
}

impl World {
    pub(crate) fn start() -> Option<World> {
        match World::try_start() {
            Ok(world) => Some(world),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    fn try_start() -> farheap::Result<World> {
        let text = "far_limit:64MiB,capacity:256MiB";
        let heap = Heap::builder().parse(text)?.start()?;
        let manager = MemoryManager::start(ByteCount::mib(64))?;
        let dir = tempfile::tempdir().expect("a directory");
        let pool =
            PoolConfig::new().create(dir.path().join("table"), ByteCount::mib(16), &manager)?;
        let page = pool.allocate()?.id();
        let config = Heap::builder().span(ByteCount::gib(64));
        let config = config.parse(text)?;
        let parts = CollectiveConfig::new().local(ByteCount::mib(1)).region(config.region()?);
        let collective = Collective::create(parts, config.open_store()?)?;
        Ok(World { _heap: heap, pool, page, collective })
    }
}

/// Allocates and frees far blocks of 64 bytes.
fn blocks(calls: u64, sized: bool) -> u64 {
    let mut sum = 0;
    for _ in 0..calls {
        let block = malloc::allocate(black_box(64), 16, Some(Tier::FAR), false);
        let block = block.expect("far memory");
        sum += u64::from(Far::contains(block.as_ptr()));
        if sized {
            // SAFETY: allocated above with this size.
            unsafe { malloc::free_sized(block, black_box(64), 16) };
        } else {
            // SAFETY: allocated above.
            unsafe { malloc::free(block) };
        }
    }
    sum
}

/// Allocates and frees nodes from one sub-allocator.
fn nodes(world: &World, sub: &impl SubAllocator, calls: u64) -> u64 {
    let node = Layout::new::<[u64; 40]>();
    for _ in 0..calls {
        let made = sub.allocate(black_box(node)).expect("room");
        // SAFETY: allocated above with this layout.
        unsafe { world.collective.deallocate(made, black_box(node)) };
    }
    calls
}

fn fixes(world: &World, calls: u64) -> u64 {
    let mut sum = 0;
    for _ in 0..calls {
        let page = world.pool.fix_shared(black_box(world.page)).expect("resident");
        sum += u64::from(page[0]) + page.id().0;
    }
    sum / world.page.0
}

fn looks(world: &World, calls: u64) -> u64 {
    let mut sum = 0;
    for _ in 0..calls {
        let page = world.pool.fix_optimistic(black_box(world.page)).expect("resident");
        sum += u64::from(page.validate());
    }
    sum
}

fn contains(calls: u64) -> u64 {
    let far = |i| Far::contains(ptr::without_provenance::<u8>(black_box(i as usize)));
    (0..calls).map(|i| u64::from(far(i))).sum()
}

pub(crate) fn pairs(world: &World) -> Vec<Pair<'_>> {
    fn row<'a>(
        name: &'static str,
        goal: Goal,
        foreign: &'static str,
        own: impl Fn(u64) -> u64 + 'a,
    ) -> Pair<'a> {
        Pair { name, goal, foreign, own: Box::new(own) }
    }
    let plain = |calls| nodes(world, &world.collective.swappable(), calls);
    let paged = |calls| nodes(world, &world.collective.new_page().expect("room"), calls);
    let (two, three) = (Goal::Calls(2), Goal::Calls(3));
    vec![
        row("C far_contains", Goal::Calls(1), "side_contains", contains),
        row(
            "C far_allocate, far_contains, far_free_sized",
            three,
            "side_malloc_free_sized",
            |calls| blocks(calls, true),
        ),
        row("C far_allocate, far_contains, far_free", three, "side_malloc_free", |calls| {
            blocks(calls, false)
        }),
        row("C fix_shared, unfix", two, "side_fix_unfix", |calls| fixes(world, calls)),
        row("C++ shared_guard", two, "side_guard", |calls| fixes(world, calls)),
        row("C fix_optimistic, validate", two, "side_optimistic", |calls| looks(world, calls)),
        row("C collective allocate, deallocate", two, "side_node", plain),
        row("C++ template node, swappable", Goal::Times(1.3), "side_template", plain),
        row("C++ template node, page", Goal::Times(1.3), "side_template_page", paged),
        row("C++ pmr far_resource", two, "side_pmr", |calls| blocks(calls, true)),
    ]
}
