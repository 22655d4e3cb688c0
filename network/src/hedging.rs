//! Second requests for reads whose server is slow.
//!
//! | the server | the read is asked for elsewhere |
//! |---|---|
//! | takes longer than for 95 % of its reads | after that, at most one request more for [`READS_PER_REQUEST`] reads |
//! | owes answers and sends nothing for several times as long ([`silence_max`]) | at once, and so are new ones: as if it were gone |
//!
//! The first answer counts.

use crate::server::NbdServer;
use std::time::{Duration, Instant};

/// One request of this number of reads may be made because a server is slow.
const READS_PER_REQUEST: u64 = 20;
/// Least time before that, where the server's 95th percentile is shorter: scheduling alone is no reason.
const LATE_AFTER_MIN: Duration = Duration::from_millis(1);
/// A server is silent after this many times its 95th percentile, and after this time at least.
const SILENT_P95S: u32 = 4;
const SILENT_AFTER_MIN: Duration = Duration::from_millis(50);
/// And at most after 1/STALL_PART of the time after which it is given up: one that was stopped answers many reads late
/// when it goes on, so that its percentile is long for a while, and it may be stopped again.
const STALL_PART: u32 = 8;

/// The requests of a queue that are made because servers are slow. See [module](self).
#[derive(Debug, Default)]
pub(crate) struct Hedging {
    reads: u64,
    requests: u64,
}

impl Hedging {
    pub(crate) fn note_read(&mut self) {
        self.reads += 1;
    }

    /// Counts second requests.
    pub(crate) fn note_requests(&mut self, count: u64) {
        self.requests += count;
    }

    /// True if a read that began then is asked for elsewhere now.
    pub(crate) fn is_due(&self, server: &NbdServer, began: Instant, now: Instant) -> bool {
        let patience = server.read_p95().max(LATE_AFTER_MIN);
        let is_late = now.saturating_duration_since(began) > patience;
        is_late && self.requests * READS_PER_REQUEST < self.reads
    }
}

/// Time without a byte of a server that owes answers, after which others are asked at once.
pub(crate) fn silence_max(server: &NbdServer, stall: Duration) -> Duration {
    let patience = (server.read_p95() * SILENT_P95S).min(stall / STALL_PART);
    patience.max(SILENT_AFTER_MIN).min(stall)
}
