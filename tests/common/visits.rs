//! Threads that read and change the pages of a pool while something is done to its memory: none ever sees
//! a page that is torn, or older than the last change.

use super::numbered::{fill, holds};
use super::{Dice, StopOnDrop, eventually};
use farheap::PageId;
use farheap::pool::BufferPool;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pages that hold their numbers at first, and a larger number after each change.
pub(crate) struct Visits {
    pages: Range<u64>,
    /// Of these, the ones that are changed.
    changed: Range<u64>,
    versions: Vec<AtomicU64>,
}

impl Visits {
    pub(crate) fn new(pages: Range<u64>, changed: Range<u64>) -> Visits {
        let versions = (0..pages.end).map(AtomicU64::new).collect();
        Visits { pages, changed, versions }
    }

    /// Runs `meanwhile` beside `threads` that visit pages; then all pages are looked at.
    pub(crate) fn beside(&self, pool: &BufferPool, threads: u64, meanwhile: impl FnOnce()) {
        let stop = AtomicBool::new(false);
        let seed = super::seed("visits");
        std::thread::scope(|scope| {
            let others = StopOnDrop(&stop);
            for thread in 0..threads {
                let stop = &stop;
                scope.spawn(move || {
                    let mut dice = Dice::new(seed ^ thread);
                    while !stop.load(Ordering::Relaxed) {
                        let page = dice.below(self.pages.end - self.pages.start);
                        self.visit(pool, self.pages.start + page, dice.below(64));
                    }
                });
            }
            meanwhile();
            drop(others);
        });
        for page in self.pages.clone() {
            let guard = pool.fix_shared(PageId(page)).expect("page");
            assert!(holds(&guard, self.version(page).load(Ordering::Relaxed)), "{page}");
        }
        assert!(eventually(|| pool.holders() == 0));
    }

    fn version(&self, page: u64) -> &AtomicU64 {
        &self.versions[page as usize]
    }

    /// Mostly looks at a page, now and then changes all of it.
    fn visit(&self, pool: &BufferPool, page: u64, dice: u64) {
        let (id, version) = (PageId(page), self.version(page));
        match dice {
            0 if self.changed.contains(&page) => {
                let mut guard = pool.fix_exclusive(id).expect("page");
                let next = version.load(Ordering::Relaxed) + 1;
                version.store(next, Ordering::Relaxed);
                fill(&mut guard, next);
            }
            1..20 => {
                let guard = pool.fix_shared(id).expect("page");
                assert!(holds(&guard, version.load(Ordering::Relaxed)), "{page}");
            }
            _ => {
                let value = pool.read_optimistic(id, |look| {
                    let first = look.u64(0);
                    (1..look.payload() / 8).all(|word| look.u64(word * 8) == first).then_some(first)
                });
                let value = value.expect("page").flatten();
                assert!(value.is_some_and(|value| value >= page), "{page} reads as {value:?}");
            }
        }
    }
}

/// Bytes of a field of this process's mappings whose addresses `picks`.
pub(crate) fn mapped_bytes(field: &str, picks: impl Fn(Range<usize>) -> bool) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (mut is_picked, mut kib) = (false, 0);
    for line in smaps.lines() {
        let head = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((from, to)) = head.and_then(|(from, to)| number(from).zip(number(to))) {
            is_picked = picks(from..to);
        } else if let Some(rest) = line.strip_prefix(field).and_then(|rest| rest.strip_prefix(':'))
            && is_picked
        {
            kib += rest.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
        }
    }
    kib << 10
}
