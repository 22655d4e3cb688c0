//! The gate: stops the threads that serve far memory while the process forks.
//!
//! ```text
//!   open --close(Evictor)--> evictors stand still --close(All)--> all stand still --open--> open
//!                                                       |
//!                                 the thread that forks faults, twice: the gate breaks and is open
//! ```
//! A thread stands still between two turns, when it is changing no page, so that words, frames and
//! mappings agree in the child. It goes on reading faults and keeps them for later, so that it notices a
//! fault of the forking thread, which would wait for ever: that one breaks the gate, if it comes again
//! after the thread was woken. A fault may be stale: another handler may have served its thread, which went on to
//! fork, between the read of the fault and the look at it.
//!
//! # Invariants
//! 1. From the end of `close` until the gate opens or breaks, all closed threads are in `stand_still`: a
//!    thread leaves by one change of the word that says how many stand and whether they may go. (With a
//!    count beside it, a thread that has seen the gate open, and is still counted, would let the next
//!    `close` pass and then go on.)

use crate::base::sync::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// How long a thread that stands still waits before it looks again.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The bits of the word that say which threads are closed.
const CLOSED: u32 = 3;
/// One thread that stands still.
const STILL: u32 = CLOSED + 1;

/// Which threads stop. (The bits of a kind include those of the kinds below it.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Closed {
    /// Those that take pages out.
    Evictor = 1,
    /// Those that bring pages in as well.
    All = CLOSED,
}

impl Closed {
    fn is_in(self, word: u32) -> bool {
        word & self as u32 == self as u32
    }
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Gate {
    /// `31..2 threads that stand still | 1..0 which are to`
    word: AtomicU32,
    /// The thread that forks.
    thread: AtomicU32,
    broken: AtomicBool,
    /// Where that thread has faulted since the gate is closed; zero: nowhere.
    fault: AtomicUsize,
}

impl Gate {
    pub(crate) fn new() -> Gate {
        let (word, thread) = (AtomicU32::new(0), AtomicU32::new(0));
        Gate { word, thread, broken: AtomicBool::new(false), fault: AtomicUsize::new(0) }
    }

    /// Stops threads until `still` of them stand, because `thread` is going to fork. `call` wakes them.
    pub(crate) fn close(&self, what: Closed, thread: u32, still: u32, call: impl Fn()) {
        self.thread.store(thread, Ordering::Relaxed);
        self.fault.store(0, Ordering::Relaxed);
        // Release: pairs with `is_closed`, after which the thread is read.
        self.word.fetch_or(what as u32, Ordering::AcqRel);
        call();
        // Acquire: what the threads did before is seen, and is in the child.
        while self.word.load(Ordering::Acquire) / STILL < still {
            pause();
        }
    }

    /// Lets all go on; `call` wakes them. Returns whether the gate was closed all the time.
    pub(crate) fn open(&self, call: impl Fn()) -> bool {
        self.word.fetch_and(!CLOSED, Ordering::AcqRel);
        call();
        !self.broken.swap(false, Ordering::AcqRel)
    }

    /// True if threads of a kind are to stand still.
    pub(crate) fn is_closed(&self, kind: Closed) -> bool {
        kind.is_in(self.word.load(Ordering::Acquire))
    }

    /// True if a fault of the thread that forks has opened the gate.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The calling thread stands still, while `wait` is called again and again, until the gate opens.
    pub(crate) fn stand_still<E>(
        &self,
        kind: Closed,
        mut wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        // Release: what this thread did is seen by the one that forks.
        self.word.fetch_add(STILL, Ordering::AcqRel);
        let leave = |word: u32| (!kind.is_in(word)).then(|| word - STILL);
        while self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, leave).is_err() {
            if let Err(error) = wait() {
                self.word.fetch_sub(STILL, Ordering::AcqRel);
                return Err(error);
            }
        }
        Ok(())
    }

    /// A thread that stands still has read a fault of `thread` at `address`. If it is the one that forks, it has not begun
    /// to, and waits: the gate opens, and the child is told ([`is_broken`](Self::is_broken)). `true`: that is not certain,
    /// and the thread is to be woken, so that it faults again if it waits.
    #[must_use]
    pub(crate) fn note_fault(&self, thread: u32, address: usize) -> bool {
        if thread != self.thread.load(Ordering::Relaxed) {
            return false;
        }
        if self.fault.swap(address, Ordering::AcqRel) != address {
            return true;
        }
        self.broken.store(true, Ordering::Release);
        self.word.fetch_and(!CLOSED, Ordering::AcqRel);
        false
    }
}

/// Waits a little for threads that have not stopped.
fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::sleep(Duration::from_micros(20));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_the_thread_that_forks_breaks_the_gate_when_it_comes_again() {
        let (gate, forker, page) = (Gate::new(), 7, 4096);
        for _ in 0..2 {
            gate.close(Closed::All, forker, 0, || ());
            assert!(!gate.note_fault(forker + 1, page), "another thread may wait");
            assert!(gate.note_fault(forker, page), "it may have been served since");
            assert!(!gate.is_broken() && gate.is_closed(Closed::All));
            assert!(gate.open(|| ()), "it was closed all the time");
        }
        gate.close(Closed::All, forker, 0, || ());
        assert!(gate.note_fault(forker, page));
        assert!(!gate.note_fault(forker, page));
        assert!(gate.is_broken() && !gate.is_closed(Closed::All));
        assert!(!gate.open(|| ()));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;
    use std::sync::Arc;

    const FORKER: u32 = 7;

    /// A region: its gate, and a page whose word and mapping agree between two turns of its thread.
    struct Region {
        gate: Gate,
        page: [AtomicUsize; 2],
        is_over: AtomicBool,
    }

    impl Region {
        fn new() -> Region {
            Region { gate: Gate::new(), page: Default::default(), is_over: AtomicBool::new(false) }
        }

        /// A thread of the region's, with one change to make.
        fn serve(&self) {
            let mut changes = 1;
            while !self.is_over.load(Ordering::Acquire) {
                if self.gate.is_closed(Closed::All) {
                    let waited: Result<(), ()> = self.gate.stand_still(Closed::All, || {
                        thread::yield_now();
                        Ok(())
                    });
                    waited.expect("nothing fails");
                }
                if changes > 0 {
                    changes -= 1;
                    self.page[0].fetch_add(1, Ordering::Relaxed);
                    self.page[1].fetch_add(1, Ordering::Relaxed);
                } else {
                    thread::yield_now();
                }
            }
        }

        /// State that a child would have: how often the page was changed.
        fn changes(&self) -> usize {
            let [word, mapping] = [0, 1].map(|at| self.page[at].load(Ordering::Relaxed));
            assert_eq!(word, mapping, "a change is half done in the child");
            word
        }
    }

    #[test]
    fn loom_nothing_changes_in_the_second_of_two_forks_that_follow_each_other() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let region = Arc::new(Region::new());
            let served = Arc::clone(&region);
            let thread = thread::spawn(move || served.serve());
            for _ in 0..2 {
                region.gate.close(Closed::All, FORKER, 1, || ());
                let before = region.changes();
                thread::yield_now();
                assert_eq!(region.changes(), before, "it went on");
                assert!(region.gate.open(|| ()), "it was closed all the time");
            }
            region.is_over.store(true, Ordering::Release);
            thread.join().expect("it ends");
        });
    }

    /// A forked child: one thread takes pages out and serves faults. It wakes the thread that faulted before it
    /// notes the page in a list, under a lock.
    struct Child {
        gate: Gate,
        fault: AtomicUsize,
        is_locked: AtomicBool,
        is_over: AtomicBool,
    }

    impl Child {
        const RAISED: usize = 1;
        const SERVED: usize = 2;

        fn new() -> Child {
            let [is_locked, is_over] = [(); 2].map(|()| AtomicBool::new(false));
            Child { gate: Gate::new(), fault: AtomicUsize::new(0), is_locked, is_over }
        }

        fn serve(&self) {
            while !self.is_over.load(Ordering::Acquire) {
                if self.gate.is_closed(Closed::Evictor) {
                    self.stand_still(Closed::Evictor);
                }
                self.serve_fault();
            }
        }

        fn stand_still(&self, kind: Closed) {
            let stood: Result<(), ()> = self.gate.stand_still(kind, || {
                match kind {
                    Closed::Evictor if self.gate.is_closed(Closed::All) => {
                        self.stand_still(Closed::All);
                    }
                    Closed::Evictor => self.serve_fault(),
                    Closed::All => thread::yield_now(),
                }
                Ok(())
            });
            stood.expect("nothing fails");
        }

        fn serve_fault(&self) {
            if self.fault.load(Ordering::Acquire) == Child::RAISED {
                self.fault.store(Child::SERVED, Ordering::Release);
                self.is_locked.store(true, Ordering::Relaxed);
                self.is_locked.store(false, Ordering::Relaxed);
            }
            thread::yield_now();
        }
    }

    /// The thread stands still once for each kind of close. Counted once for both it would count as stopped while it
    /// serves the fault of the thread that forks, whose child would wait for the lock for ever.
    #[test]
    fn loom_no_child_has_a_lock_that_was_held_while_a_fault_before_the_fork_was_served() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let child = Arc::new(Child::new());
            let served = Arc::clone(&child);
            let thread = thread::spawn(move || served.serve());
            child.gate.close(Closed::Evictor, FORKER, 1, || ());
            child.fault.store(Child::RAISED, Ordering::Release);
            while child.fault.load(Ordering::Acquire) != Child::SERVED {
                thread::yield_now();
            }
            child.gate.close(Closed::All, FORKER, 2, || ());
            assert!(!child.is_locked.load(Ordering::Relaxed), "it is locked in the child");
            assert!(child.gate.open(|| ()), "it was closed all the time");
            child.is_over.store(true, Ordering::Release);
            thread.join().expect("it ends");
        });
    }
}
