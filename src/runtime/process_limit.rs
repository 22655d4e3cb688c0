//! A limit on the resident memory of the process: far memory gives way to what is not far.
//!
//! Code, stacks, local memory and what the program maps itself cannot be evicted. So the maintenance
//! thread reads the process's resident memory a hundred times a second, and gives the far tier the rest
//! of the limit. Uses `sys` and `region`.
//!
//! # Invariants
//! 1. The tier has at most `limit - (resident - charged to the tier)`, and at least what it needs to
//!    work; where that exceeds the limit, a warning on standard error says so.

use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::paging::region::Region;
use crate::sys::statm::Statm;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often resident memory is read. A program that touches new memory as fast as the kernel gives it, about
/// 2 GiB/s, gets 20 MiB until far memory begins to give way; reading takes 5 us.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The tier's limit is raised in steps of this part of the process's limit: what the kernel says wavers,
/// and each change wakes the evictor.
const STEP: u64 = 256;

/// How long the process may be above its limit before the warning: a start or a fork is over by then.
const OVER_MAX: Duration = Duration::from_secs(1);

/// The limit, and what is known about keeping it.
#[derive(Debug)]
pub(super) struct ProcessLimit {
    limit: ByteCount,
    statm: Statm,
    /// Since when too little of the limit is left for far memory.
    over: Mutex<Over>,
}

#[derive(Clone, Copy, Debug)]
enum Over {
    No,
    Since(Instant),
    /// The warning was printed, and is not repeated until the process was below its limit.
    Told,
}

impl ProcessLimit {
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) where the kernel does not tell what is resident.
    pub(super) fn new(limit: ByteCount) -> Result<ProcessLimit> {
        Ok(ProcessLimit { limit, statm: Statm::open()?, over: Mutex::new(Over::No) })
    }

    pub(super) fn limit(&self) -> ByteCount {
        self.limit
    }

    /// Gives far memory the part of the limit that the rest of the process does not use.
    pub(super) fn follow(&self, region: &Region) {
        let Some(resident) = self.statm.resident() else { return };
        // Read after `resident`: a page that comes in between the two is not counted as local memory.
        let rest = resident.0.saturating_sub(region.budget().charged().0);
        let room = ByteCount(self.limit.0.saturating_sub(rest));
        let now = region.budget().limit();
        if room < now || room.0 - now.0 >= self.limit.0 / STEP {
            region.leave_room(room);
        }
        self.tell(ByteCount(rest), room < region.limit_min(), region);
    }

    /// Warns when memory that is not far has been too much for [`OVER_MAX`].
    fn tell(&self, rest: ByteCount, is_over: bool, region: &Region) {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        *over = match *over {
            _ if !is_over => Over::No,
            Over::No => Over::Since(Instant::now()),
            Over::Since(since) if since.elapsed() >= OVER_MAX => {
                let (limit, floor) = (self.limit, region.limit_min());
                region.warn(
                    "the process is above its limit",
                    format_args!(
                        "the process is above its limit of {limit}: {rest} of it is not far memory \
                         (code, stacks, local memory, memory mapped by the program), and far \
                         memory needs {floor}"
                    ),
                );
                Over::Told
            }
            unchanged => unchanged,
        };
    }
}
