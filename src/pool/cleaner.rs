//! The pool's worker thread: reads ahead what was asked for, writes dirty pages ahead of their
//! eviction.
//!
//! The cleaner goes over the resident pages in address order, a batch at a time with a pause in
//! between: what is dirty and held by nobody is written, neighbours in one request, so that a
//! reclaim finds clean pages and a page that stays unchanged is written once. What the hand has
//! cooled goes at once, for it leaves next; the rest more slowly, because a page that is changed
//! all the time would be written all the time (`docs/measurements/cooperative.md`, the cleaner). When there
//! is nothing to write, runs are put into huge pages (`huge`).

use super::evict::BATCH_MAX;
use super::huge::Collapser;
use super::{BufferPool, PageId};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause between batches of the cleaner while it finds something to write.
const PAUSE: Duration = Duration::from_millis(1);

/// Pause between batches of pages that are still in use: 256 pages then are 13,000 a second.
const SLOWLY: Duration = Duration::from_millis(20);

/// Pause between rounds that found nothing.
const IDLE: Duration = Duration::from_millis(20);

/// Pause between runs that are put into huge pages: an eighth of a processor's time.
const BETWEEN_RUNS: Duration = Duration::from_millis(5);

/// 64-page steps looked at without a pause.
const STEPS_MAX: usize = 4096;

/// Which dirty pages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// Not touched since the hand passed.
    Cool,
    All,
}

pub(super) fn spawn(pool: &Arc<BufferPool>, clean: bool, huge: bool) -> Result<JoinHandle<()>> {
    let weak = Arc::downgrade(pool);
    std::thread::Builder::new()
        .name("farheap-pool".to_owned())
        .spawn(move || run(&weak, clean, huge))
        .map_err(|error| Error::Os {
            call: "clone",
            errno: error.raw_os_error().unwrap_or_default(),
        })
}

fn run(pool: &Weak<BufferPool>, clean: bool, huge: bool) {
    let mut collapser = Collapser::new();
    let (mut cool_at, mut all_at) = (0, 0);
    let mut last_all = Instant::now();
    loop {
        let _ours = keep_local(); // Anew each time: a heap may have started meanwhile.
        let Some(pool) = pool.upgrade() else { return };
        if pool.stop.load(Ordering::Acquire) {
            return;
        }
        let prefetched = pool.serve_prefetches();
        let mut cleaned = clean && pool.clean_some(&mut cool_at, Which::Cool);
        if clean && last_all.elapsed() >= SLOWLY {
            cleaned |= pool.clean_some(&mut all_at, Which::All);
            last_all = Instant::now();
        }
        let collapsed = huge && !prefetched && !cleaned && collapser.turn(&pool);
        drop(pool);
        if !prefetched {
            let pause = if collapsed { BETWEEN_RUNS } else { IDLE };
            std::thread::park_timeout(if cleaned { PAUSE } else { pause });
        }
    }
}

impl BufferPool {
    pub(super) fn wake_worker(&self) {
        if let Some(worker) = &*self.worker.lock() {
            worker.thread().unpark();
        }
    }

    /// Writes up to a batch of dirty pages from step `at` on; returns whether any was written.
    fn clean_some(&self, at: &mut usize, which: Which) -> bool {
        let steps = (self.end.load(Ordering::Acquire) as usize).div_ceil(64);
        let mut batch = [PageId(0); BATCH_MAX];
        let mut len = 0;
        for _ in 0..steps.min(STEPS_MAX) {
            if *at >= steps {
                *at = 0;
            }
            let mut bits = self.resident[*at].load(Ordering::Relaxed);
            if len + bits.count_ones() as usize > BATCH_MAX {
                break;
            }
            while bits != 0 {
                let page = PageId((*at * 64) as u64 + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
                let seen = self.word(page).load();
                let is_due = seen.dirty() && seen.is_free() && (which == Which::All || seen.cool());
                if is_due && self.word(page).try_begin_write(seen) {
                    batch[len] = page;
                    len += 1;
                }
            }
            *at += 1;
        }
        batch[..len].sort_unstable();
        let written = self.write_group(&batch[..len]).written;
        self.counters.cleaned.fetch_add(written, Ordering::Relaxed);
        written > 0
    }
}
