//! Where a filler runs: on the processor of the thread whose faults it serves.
//!
//! Waking a thread on another processor costs more than everything a fault needs otherwise
//! (10-17 us against 3-7 on the same one, measured here). While the faults come from one thread
//! and one at a time, the filler therefore follows that thread: the thread sleeps while the
//! filler works, so they never want the processor at the same time. As soon as faults overlap or
//! pages are read ahead, there is work for two processors, and the filler runs where the
//! scheduler puts it.

use crate::sys::thread;

/// Lonely faults in a row after which a thread is followed, and looked for again.
const STREAK: u32 = 64;

/// Which thread a filler follows.
#[derive(Debug, Default)]
pub(super) struct Follow {
    thread: u32,
    streak: u32,
    /// The processor the filler is bound to.
    bound: Option<u32>,
}

impl Follow {
    /// Notes a fault of a thread; `lonely`: nothing else is being served.
    pub(super) fn fault(&mut self, thread: u32, lonely: bool) {
        if !lonely || thread != self.thread {
            self.thread = thread;
            self.streak = 0;
            if self.bound.take().is_some() {
                thread::run_anywhere();
            }
            return;
        }
        self.streak += 1;
        if self.streak.is_multiple_of(STREAK) {
            let processor = thread::processor_of(thread);
            if processor.is_some() && processor != self.bound {
                // Not being allowed to costs speed only.
                self.bound = processor.filter(|processor| thread::run_on(*processor));
            }
        }
    }
}
