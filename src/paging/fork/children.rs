//! The living children of a process that inherited its slots, and when they are gone.
//!
//! Each has the writing end of a pipe that is closed when it ends or calls `exec`; the reading end is
//! here. What was forked by the child has the writing end too, and reads the same slots.
//!
//! # Invariants
//! 1. A hold ends after the last process that may read its slots has closed its end of the pipe.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicUsize, Ordering, Rank};
use crate::paging::pager::pieces::FarParts;
use crate::store::SlotMap;
use crate::store::slots::{HOLDS_MAX, HoldId};
use crate::sys::event::poll_readable;
use crate::sys::fork::{self, Private, file_of, pipe};
use crate::sys::refused;
use crate::sys::signals::FaultLock;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a look for children that are gone counts: it costs two system calls for each child, and the
/// evictor, which looks, may make thousands of turns a second.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A child that may be about to be born.
#[derive(Debug)]
pub(super) struct Birth {
    hold: HoldId,
    alive: Private<OwnedFd>,
    /// The child's end, kept open by it for as long as it may read slots.
    pub(super) end: OwnedFd,
    /// The child's part of the region.
    pub(super) far: FarParts,
}

impl Birth {
    /// Prepares for a child that reads the slots of `maps`, and has far memory where its parent has, in `far`.
    ///
    /// # Errors
    /// When there are too many children, or descriptors.
    pub(super) fn prepare(maps: &SlotMap, far: FarParts) -> Result<Birth> {
        let [reader, writer] = pipe().map_err(refused("pipe2"))?;
        let hold = maps.hold()?.ok_or(Error::Unsupported {
            feature: "far memory in another forked child",
            why: "64 children that have it are alive",
        })?;
        Ok(Birth { hold, alive: Private::new(reader), end: writer, far })
    }
}

#[derive(Debug)]
struct LivingChild {
    hold: HoldId,
    /// Some programs close all descriptors that they do not know. A child whose pipe is gone so counts as
    /// alive for ever.
    alive: Private<OwnedFd>,
    file: Option<(u64, u64)>,
}

#[derive(Debug)]
struct ChildList {
    children: Vec<LivingChild>,
    looked: Instant,
}

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Children {
    count: AtomicUsize,
    state: FaultLock<ChildList>,
}

impl Children {
    pub(in crate::paging) fn new() -> Children {
        let state = ChildList { children: Vec::with_capacity(HOLDS_MAX), looked: Instant::now() };
        Children { count: AtomicUsize::new(0), state: FaultLock::new(Rank::Leaf, state) }
    }

    /// How many are alive, as far as is known.
    pub(in crate::paging) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// The process has forked, or failed to.
    pub(super) fn add(&self, birth: Birth) {
        let Birth { hold, alive, end, far: _ } = birth;
        fork::close_and_reserve(end, &alive);
        let file = file_of(alive.as_raw_fd());
        let mut state = self.state.lock();
        state.children.push(LivingChild { hold, alive, file });
        self.count.store(state.children.len(), Ordering::Relaxed);
    }

    /// Ends the holds of children that are gone, if it is time to look.
    pub(in crate::paging) fn reap(&self, maps: &SlotMap) {
        if self.count() == 0 || self.state.lock().looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.reap_now(maps);
    }

    /// Ends the holds of children that are gone. To be called with the table of descriptors that they were
    /// forked with.
    pub(super) fn reap_now(&self, maps: &SlotMap) {
        self.state.lock().looked = Instant::now();
        while let Some(child) = self.take_gone() {
            maps.end_hold(child.hold);
            fork::reserve_number_of(child.alive);
        }
    }

    fn take_gone(&self) -> Option<LivingChild> {
        let mut state = self.state.lock();
        // Nobody writes: readable means that all ends are closed.
        let is_gone = |child: &LivingChild| {
            let fd = child.alive.as_raw_fd();
            file_of(fd) == child.file && poll_readable(&[fd], Duration::ZERO) == Ok(true)
        };
        let at = state.children.iter().position(is_gone)?;
        let child = state.children.swap_remove(at);
        self.count.store(state.children.len(), Ordering::Relaxed);
        Some(child)
    }
}
