//! The permission to write a table's export, of an owner that has found its mark there lately: see [`table`](crate::table).

use crate::server_mark::{MARK_LEN, block_of};
use crate::sync::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An owner does not write after this time without a look at its mark, which it looks at every second: a server that is
/// throttled by its disk may take seconds for each.
pub(crate) const LEASE: Duration = Duration::from_secs(5);

const BEAT_START: &str = "farheap: beat ";

/// The beat with a number.
pub(crate) fn beat_of(run: u64, number: u64) -> [u8; MARK_LEN] {
    block_of(format!("{BEAT_START}{number} of run {run}\n").as_bytes())
}

/// The permission to write, of an owner that has found its mark lately.
#[derive(Debug)]
pub(crate) struct Lease {
    /// 0: nobody's yet.
    run: AtomicU64,
    beats: AtomicU64,
    born: Instant,
    /// Milliseconds from then to the end of the lease.
    until: AtomicU64,
    /// Time after which the kernel gives a connection up that delivers nothing.
    unacked_max: Duration,
}

impl Lease {
    pub(crate) fn new(unacked_max: Duration) -> Lease {
        let born = Instant::now();
        let [run, beats, until] = [(); 3].map(|()| AtomicU64::new(0));
        Lease { run, beats, born, until, unacked_max }
    }

    /// The export is the run's with this number.
    pub(crate) fn begin(&self, run: u64) {
        self.run.store(run, Ordering::SeqCst);
    }

    /// True if the run with this number has owned the export.
    pub(crate) fn is_of(&self, run: u64) -> bool {
        run != 0 && self.run.load(Ordering::SeqCst) == run
    }

    /// Content of the run's next beat, if there is one to be written.
    pub(crate) fn next_beat(&self) -> Option<[u8; MARK_LEN]> {
        let run = self.run.load(Ordering::SeqCst);
        (run != 0).then(|| beat_of(run, self.beats.fetch_add(1, Ordering::SeqCst) + 1))
    }

    /// The mark was looked at after `from`, and a beat written.
    pub(crate) fn renew(&self, from: Instant) {
        let until = from + LEASE - self.born;
        self.until.fetch_max(until.as_millis() as u64, Ordering::SeqCst);
    }

    pub(crate) fn unacked_max(&self) -> Duration {
        self.unacked_max
    }

    /// True if it was an owner's and has run out.
    pub(crate) fn has_lapsed(&self, now: Instant) -> bool {
        self.run.load(Ordering::SeqCst) != 0 && !self.is_valid(now)
    }

    /// True if it has not run out.
    pub(crate) fn is_valid(&self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.born).as_millis() as u64;
        passed < self.until.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_from_before_the_look() {
        let lease = Lease::new(LEASE);
        let born = lease.born;
        assert!(!lease.is_valid(born) && !lease.has_lapsed(born) && lease.next_beat().is_none());
        lease.begin(7);
        assert!(lease.has_lapsed(born) && lease.next_beat() == Some(beat_of(7, 1)));
        lease.renew(born + LEASE);
        lease.renew(born); // One that comes late takes nothing away.
        assert!(lease.is_valid(born + LEASE * 2 - Duration::from_millis(1)));
        assert!(!lease.is_valid(born + LEASE * 2));
    }
}
