//! The two sides of each row.

#![expect(unsafe_code, reason = "calls C")]

use crate::common::{self, Compiler, succeed};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::sub::{Collective, CollectiveConfig, SubAllocator};
use farheap::tier::manager::{MemoryManager, Mode};
use farheap::{ByteCount, Config, Heap, PageId, Placement, malloc};
use std::alloc::Layout;
use std::ffi::{CStr, CString, c_void};
use std::hint::black_box;
use std::ptr;
use std::sync::Arc;

/// A row: the same calls from C or C++ and from Rust.
pub(crate) struct Pair<'a> {
    pub(crate) name: &'static str,
    pub(crate) goal: Goal,
    pub(crate) foreign: Box<crate::Side<'a>>,
    pub(crate) own: Box<crate::Side<'a>>,
}

/// What the other side may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// So many calls of 2 ns more.
    Calls(u32),
    /// So many times the cost.
    Times(f64),
}

type Loop = unsafe extern "C" fn(u64) -> u64;

/// `side.cpp`, compiled and loaded. It stays loaded: it has threads.
pub(crate) struct Library {
    handle: *mut c_void,
    table: tempfile::TempDir,
}

impl Library {
    /// Compiles and starts the other side; `None`, and a reason on the way, if that cannot be.
    pub(crate) fn build() -> Option<Library> {
        const CPP: Compiler = Compiler { name: "g++", standard: "-std=c++17" };
        if common::installed(&[CPP]).is_empty() {
            return None;
        }
        let table = tempfile::tempdir().expect("a directory");
        let source = common::crate_dir().join("benches/ffi/side.cpp");
        let to = table.path().join("side.so");
        let options = ["-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic"];
        CPP.program(&source, &to, &options);
        succeed(std::process::Command::new("nm").arg("-D").arg(&to));
        let path = CString::new(to.to_str().expect("UTF-8")).expect("no zero");
        // SAFETY: a path; the library's own constructors are farheap's, which do nothing.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: reads what the thread's last failure left.
            let reason = unsafe { libc::dlerror() };
            // SAFETY: after a failure there is a message, a string until the next call.
            let reason = unsafe { CStr::from_ptr(reason) };
            println!("skipped: {}", reason.to_string_lossy());
            return None;
        }
        let library = Library { handle, table };
        let start = library.symbol(c"side_start");
        // SAFETY: `side.cpp` defines it so.
        let start: unsafe extern "C" fn(*const i8) -> bool = unsafe { std::mem::transmute(start) };
        let table = library.table.path().join("table");
        let table = CString::new(table.to_str().expect("UTF-8")).expect("no zero");
        // SAFETY: a string; called once.
        unsafe { start(table.as_ptr()) }.then_some(library)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a library that stays loaded, and a name.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is in side.cpp");
        symbol
    }

    fn side(&self, name: &CStr) -> Box<crate::Side<'_>> {
        // SAFETY: all loops of `side.cpp` have this type.
        let call: Loop = unsafe { std::mem::transmute(self.symbol(name)) };
        // SAFETY: `side_start` has been called.
        Box::new(move |calls| unsafe { call(calls) })
    }
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
        let text = "limit:64MiB,capacity:256MiB";
        let heap = Heap::start(Config::parse(text)?)?;
        let manager = MemoryManager::start(ByteCount::mib(64), Mode::Cooperative)?;
        let dir = tempfile::tempdir().expect("a directory");
        let pool =
            PoolConfig::new().create(dir.path().join("table"), ByteCount::mib(16), &manager)?;
        let page = pool.allocate()?.id();
        let config = Config::builder().page(ByteCount::kib(4)).span(ByteCount::gib(64));
        let config = config.parse(text)?.build()?;
        let parts = CollectiveConfig { local: ByteCount::mib(1), region: config.region() };
        let collective = Collective::create(parts, config.open_store()?)?;
        Ok(World { _heap: heap, pool, page, collective })
    }
}

/// Allocates and frees far blocks of 64 bytes.
fn blocks(calls: u64, sized: bool) -> u64 {
    let mut sum = 0;
    for _ in 0..calls {
        let block = malloc::allocate(black_box(64), 16, Some(Placement::Far), false);
        let block = block.expect("far memory");
        sum += u64::from(malloc::is_far(block.as_ptr()));
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
    let far = |i| malloc::is_far(ptr::without_provenance(black_box(i as usize)));
    (0..calls).map(|i| u64::from(far(i))).sum()
}

pub(crate) fn pairs<'a>(library: &'a Library, world: &'a World) -> Vec<Pair<'a>> {
    let row = |name, goal, side, own: Box<crate::Side<'a>>| Pair {
        name,
        goal,
        foreign: library.side(side),
        own,
    };
    let plain = |calls| nodes(world, &world.collective.swappable(), calls);
    let paged = |calls| nodes(world, &world.collective.new_page().expect("room"), calls);
    let (two, three) = (Goal::Calls(2), Goal::Calls(3));
    vec![
        row("C far_contains", Goal::Calls(1), c"side_contains", Box::new(contains)),
        row(
            "C far_allocate, far_contains, far_free_sized",
            three,
            c"side_malloc_free_sized",
            Box::new(|calls| blocks(calls, true)),
        ),
        row(
            "C far_allocate, far_contains, far_free",
            three,
            c"side_malloc_free",
            Box::new(|calls| blocks(calls, false)),
        ),
        row("C fix_shared, unfix", two, c"side_fix_unfix", Box::new(|calls| fixes(world, calls))),
        row("C++ shared_guard", two, c"side_guard", Box::new(|calls| fixes(world, calls))),
        row(
            "C fix_optimistic, validate",
            two,
            c"side_optimistic",
            Box::new(|calls| looks(world, calls)),
        ),
        row("C collective allocate, deallocate", two, c"side_node", Box::new(plain)),
        row("C++ template node, swappable", Goal::Times(1.3), c"side_template", Box::new(plain)),
        row("C++ template node, page", Goal::Times(1.3), c"side_template_page", Box::new(paged)),
        row("C++ pmr far_resource", two, c"side_pmr", Box::new(|calls| blocks(calls, true))),
    ]
}
