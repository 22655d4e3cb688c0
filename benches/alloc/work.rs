//! What is allocated and freed, and how long it takes.
#![expect(unsafe_code, reason = "allocates by hand")]

use farheap::{Far, Scope, Tier};
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Blocks in one message of a [`Kind::Handed`] work, and messages under way.
const HANDED: usize = 64;
const MESSAGES: usize = 4;

/// Operations between two looks at the clock.
const BATCH: u32 = 1024;

/// Warming up takes this much longer than a sample: caches and arenas fill meanwhile, and fresh memory
/// is touched for the first time. That is a fault a page in far memory, which is not measured here.
const WARM: u32 = 5;

/// Distance of the bytes that a [`Touch::All`] work writes: one a page.
const PAGE: usize = 4096;

/// How allocations and frees follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One block at a time.
    Pair,
    /// A random one of `live` blocks is replaced by one of another size.
    Churn { live: usize },
    /// One thread allocates, another one frees.
    Handed,
}

/// What is written of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Its first byte.
    First,
    /// A byte of every page: far memory is resident then.
    All,
}

/// A work: its sizes are from `from` to `to` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) kind: Kind,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Every power of two is as likely as any other; else every size is.
    by_magnitude: bool,
    pub(crate) touch: Touch,
    pub(crate) threads: usize,
}

/// All works.
pub(crate) fn works() -> Vec<Work> {
    let work = |kind, from, to| Work {
        kind,
        from,
        to,
        by_magnitude: false,
        touch: Touch::First,
        threads: 1,
    };
    let (kib, mib) = (1 << 10, 1 << 20);
    let sizes =
        [16, 64, 256, kib, 4 * kib, 16 * kib, 32 * kib, 64 * kib, 256 * kib, mib, 4 * mib, 8 * mib];
    let mut all: Vec<Work> = sizes.map(|size| work(Kind::Pair, size, size)).into();
    for size in [4 * kib, 64 * kib, mib] {
        all.push(Work { touch: Touch::All, ..work(Kind::Pair, size, size) });
    }
    for threads in [1, 2] {
        let random = work(Kind::Churn { live: 64 }, 16, 8 * mib);
        let chunks = work(Kind::Churn { live: 1_000 }, 16 * kib, 256 * kib);
        all.extend([
            Work { threads, ..work(Kind::Churn { live: 10_000 }, 16, kib) },
            Work { threads, ..work(Kind::Churn { live: 10_000 }, 1, 16 * kib) },
            Work { threads, ..chunks },
            Work { threads, touch: Touch::All, ..chunks },
            Work { threads, by_magnitude: true, ..random },
        ]);
    }
    for (from, to) in [(16, kib), (16 * kib, 256 * kib)] {
        all.push(Work { threads: 2, ..work(Kind::Handed, from, to) });
    }
    all
}

impl Work {
    pub(crate) fn name(self) -> String {
        let sizes = if self.from == self.to {
            short(self.to)
        } else {
            format!("{} to {}", short(self.from), short(self.to))
        };
        let touched = if self.touch == Touch::All { ", written" } else { "" };
        match (self.kind, self.threads) {
            (Kind::Pair, _) => format!("pair {sizes}{touched}"),
            (Kind::Churn { .. }, 1) => format!("churn {sizes}{touched}"),
            (Kind::Churn { .. }, threads) => format!("churn {sizes}{touched} {threads} threads"),
            (Kind::Handed, _) => format!("freed by another thread {sizes}"),
        }
    }

    /// Nanoseconds per allocation and its free, of a sample that takes about `time`. Checks that
    /// blocks are where `placement` says, if it says something.
    pub(crate) fn sample(
        self,
        alloc: &(impl GlobalAlloc + Sync),
        placement: Option<Tier>,
        time: Duration,
    ) -> f64 {
        if self.kind == Kind::Handed {
            return self.handed(alloc, placement, time);
        }
        let body = |seed: u64| {
            let _scope = placement.map(Scope::enter);
            match self.kind {
                Kind::Churn { live } => self.churn(alloc, placement, live, seed, time),
                _ => self.pairs(alloc, placement, time),
            }
        };
        thread::scope(|all| {
            let body = &body;
            let seeds = 1..=self.threads as u64;
            let threads: Vec<_> = seeds.map(|seed| all.spawn(move || body(seed))).collect();
            let ns = threads.into_iter().map(|thread| thread.join().expect("no check failed"));
            // They run at the same time.
            ns.sum::<f64>() / (self.threads * self.threads) as f64
        })
    }

    fn pairs(self, alloc: &impl GlobalAlloc, placement: Option<Tier>, time: Duration) -> f64 {
        let layout = black_box(layout(self.to));
        self.block(alloc, layout).check(placement);
        ns_each(time, || drop(self.block(alloc, layout)))
    }

    fn churn(
        self,
        alloc: &impl GlobalAlloc,
        placement: Option<Tier>,
        live: usize,
        seed: u64,
        time: Duration,
    ) -> f64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut blocks: Vec<_> =
            (0..live).map(|_| self.block(alloc, layout(self.size(&mut random)))).collect();
        let ns = ns_each(time, || {
            let at = random.below(live);
            let layout = layout(self.size(&mut random));
            // Freed first, as by a query that has done with a chunk when it reads the next.
            drop(blocks.swap_remove(at));
            blocks.push(self.block(alloc, layout));
        });
        blocks.iter().for_each(|block| block.check(placement));
        ns
    }

    fn handed(
        self,
        alloc: &(impl GlobalAlloc + Sync),
        placement: Option<Tier>,
        time: Duration,
    ) -> f64 {
        let (send, receive) = mpsc::sync_channel::<Vec<Block<_>>>(MESSAGES);
        thread::scope(|all| {
            all.spawn(move || receive.into_iter().for_each(drop));
            let _scope = placement.map(Scope::enter);
            let mut random = Random(1);
            let mut blocks = Vec::new();
            let ns = ns_each(time, || {
                blocks.push(self.block(alloc, layout(self.size(&mut random))));
                if blocks.len() == HANDED {
                    blocks[0].check(placement);
                    send.send(std::mem::take(&mut blocks)).expect("the other thread takes all");
                }
            });
            drop(send); // The other thread ends.
            ns
        })
    }

    fn size(self, random: &mut Random) -> usize {
        if self.by_magnitude {
            let (low, high) = (self.from.ilog2() as usize, self.to.ilog2() as usize);
            let size = 1 << (low + random.below(high - low));
            return size + random.below(size);
        }
        self.from + random.below(self.to - self.from + 1)
    }

    /// A block, written as the work says.
    #[inline]
    fn block<A: GlobalAlloc>(self, alloc: &A, layout: Layout) -> Block<'_, A> {
        // SAFETY: no work has empty layouts.
        let ptr = black_box(unsafe { alloc.alloc(layout) });
        assert!(!ptr.is_null(), "out of memory");
        let end = if self.touch == Touch::All { layout.size() } else { 1 };
        for at in (0..end).step_by(PAGE) {
            // SAFETY: inside of the block.
            let byte = unsafe { ptr.add(at) };
            // SAFETY: the block is ours.
            unsafe { byte.write(1) };
        }
        Block { alloc, ptr, layout }
    }
}

/// Nanoseconds of each `operation`, once warm.
fn ns_each(time: Duration, mut operation: impl FnMut()) -> f64 {
    let mut run = |time: Duration| {
        let (start, mut batches) = (Instant::now(), 0.0);
        loop {
            (0..BATCH).for_each(|_| operation());
            batches += 1.0;
            let elapsed = start.elapsed();
            if elapsed >= time {
                return elapsed.as_nanos() as f64 / (batches * f64::from(BATCH));
            }
        }
    };
    run(time * WARM);
    run(time)
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).expect("a valid layout")
}

/// A block; freed when dropped.
struct Block<'a, A: GlobalAlloc> {
    alloc: &'a A,
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: it owns its memory, and allocators here free from any thread.
unsafe impl<A: GlobalAlloc + Sync> Send for Block<'_, A> {}

impl<A: GlobalAlloc> Block<'_, A> {
    fn check(&self, placement: Option<Tier>) {
        let Some(placement) = placement else { return };
        assert_eq!(Far::contains(self.ptr), placement == Tier::FAR, "{:?}", self.layout);
    }
}

impl<A: GlobalAlloc> Drop for Block<'_, A> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: allocated in `Work::block` with this layout.
        unsafe { self.alloc.dealloc(self.ptr, self.layout) };
    }
}

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % bound
    }
}

/// A size in words.
fn short(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
