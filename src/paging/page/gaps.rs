//! Gaps: moments in which memory of the region is not registered although it is far memory.
//!
//! The kernel takes no mode away from a registration. So a chunk that is opened
//! ([`kernel_filled`](crate::paging::kernel_filled)) is taken out of userfaultfd's hands and put back with
//! fewer modes, and a thread that asks the kernel in between is told that the chunk is not registered, as
//! of memory that the program has mapped something over. Where that was believed, a page was mapped anew
//! in a chunk that the kernel fills, and its next touch faulted for ever.
//!
//! ```text
//!   opens a chunk:  begun + 1 -> unregister -> register -> ended + 1
//!   asks:           e = ended -> ask the kernel: yes ------------------> it is far memory
//!                                              no -> b = begun: b = e -> it is not
//!                                                               else --> ask again
//! ```
//! A thread that reads `b = e` knows that no gap was open from the first read to the last: `ended` never passes
//! `begun`, and neither goes back.

use crate::base::sync::{AtomicU64, Ordering, fence};
use crate::paging::page::backoff;

/// Counts the gaps of one region.
#[derive(Debug, Default)]
pub(in crate::paging) struct Gaps {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Gaps {
    /// Runs what leaves some memory unregistered for a moment.
    pub(in crate::paging) fn during<T>(&self, act: impl FnOnce() -> T) -> T {
        self.begun.fetch_add(1, Ordering::Relaxed);
        // A thread that is told no because of what `act` does sees that it has begun: pairs with the fence in
        // `holds`.
        fence(Ordering::SeqCst);
        let done = act();
        // Release: a thread that counts this gap as ended is told yes.
        self.ended.fetch_add(1, Ordering::Release);
        done
    }

    /// True if `ask` returns true, or would but for a gap.
    pub(in crate::paging) fn holds(&self, mut ask: impl FnMut() -> bool) -> bool {
        let mut spins = 0;
        loop {
            let ended = self.ended.load(Ordering::Acquire);
            if ask() {
                return true;
            }
            // Pairs with the fence in `during`.
            fence(Ordering::SeqCst);
            if self.begun.load(Ordering::Relaxed) == ended {
                return false;
            }
            // 2 us, unless the thread that opens a chunk waits for a processor.
            backoff(&mut spins);
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::Gaps;
    use crate::base::sync::{AtomicBool, AtomicU32, Ordering};
    use crate::paging::page::chunk_state::{ChunkState, Phase};
    use loom::thread;
    use std::sync::Arc;

    /// Far memory is never taken for the program's while chunks are opened around it.
    #[test]
    fn loom_far_memory_is_told_from_others_while_a_chunk_is_opened() {
        loom::model(|| {
            let shared = Arc::new((Gaps::default(), AtomicBool::new(true)));
            let opener = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (gaps, registered) = &*shared;
                    for _ in 0..2 {
                        gaps.during(|| {
                            registered.store(false, Ordering::Relaxed);
                            registered.store(true, Ordering::Relaxed);
                        });
                    }
                }
            });
            let (gaps, registered) = &*shared;
            assert!(gaps.holds(|| registered.load(Ordering::Relaxed)), "taken for the program's");
            opener.join().expect("no panic");
        });
    }

    /// How the one part of the chunk that the program has mapped over is registered.
    const NOT: u32 = 0;
    const FOR_FAULTS: u32 = 1;
    const UNWATCHED: u32 = 2;

    /// A part that the program had mapped over is taken back while a handler would like to open its
    /// chunk: no chunk is open of which a part sends its faults to the handlers.
    #[test]
    fn loom_what_is_taken_back_is_not_taken_back_in_an_open_chunk() {
        loom::model(|| {
            let shared = Arc::new((ChunkState::default(), Gaps::default(), AtomicU32::new(NOT)));
            let opener = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (chunk, gaps, part) = &*shared;
                    if !chunk.latch(Phase::Closed) {
                        return;
                    }
                    // Asked with the chunk latched: what is far memory now stays so.
                    let is_own = gaps.holds(|| part.load(Ordering::Acquire) != NOT);
                    if is_own {
                        gaps.during(|| {
                            part.store(NOT, Ordering::Release);
                            part.store(UNWATCHED, Ordering::Release);
                        });
                    }
                    chunk.unlatch(if is_own { Phase::Open } else { Phase::Closed });
                }
            });
            let (chunk, gaps, part) = &*shared;
            // It is closed, and nobody opens it before all of it is far memory.
            if !gaps.holds(|| part.load(Ordering::Acquire) != NOT) {
                part.store(FOR_FAULTS, Ordering::Release);
            }
            opener.join().expect("no panic");
            let is_open = chunk.look().phase() == Phase::Open;
            let expected = if is_open { UNWATCHED } else { FOR_FAULTS };
            assert_eq!(part.load(Ordering::Acquire), expected);
        });
    }
}
