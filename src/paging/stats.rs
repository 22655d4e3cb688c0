//! Work that a region has done: a snapshot of plain numbers.

use crate::base::statistics::statistics;
use crate::base::units::{ByteCount, PageCount};
use crate::for_region_stats;
use crate::paging::counters::Counters;
use crate::paging::kernel_filled;
use crate::paging::page::PAGE;
use crate::paging::pager::Pager;

/// The value of a counter, by the kind of its row.
macro_rules! counted {
    (count $counter:expr) => {
        $counter.reading()
    };
    (gauge $counter:expr) => {
        $counter.reading()
    };
    ($kind:ident $counter:expr) => {
        Default::default()
    };
}

macro_rules! snapshot {
    ($($label:literal { $($(#[$doc:meta])* $name:ident: $kind:ident $words:literal;)* })*) => {
        statistics! {
            /// Statistics of one region since its start. Counts only grow; sizes are of the moment.
            pub struct Stats {
                $($label { $($(#[$doc])* $name: $kind $words;)* })*
            }
        }

        /// A snapshot of what is counted; the rest is zero.
        fn snapshot_of(counters: &Counters) -> Stats {
            Stats { $($($name: counted!($kind counters.$name),)*)* }
        }
    };
}

for_region_stats!(snapshot);

impl Stats {
    pub(in crate::paging) fn of(pager: &Pager, committed: PageCount) -> Stats {
        let counters = pager.counters();
        let counted = snapshot_of(counters);
        let (page, charged) = (PAGE as u64, pager.budget().charged());
        // Charged, and no memory.
        let absent =
            kernel_filled::open_but_absent(pager.memory()).0 + pager.pool().charged_ahead();
        Stats {
            limit_bytes: pager.budget().limit(),
            resident_bytes: ByteCount(charged.0.saturating_sub(absent)),
            charged_bytes: charged,
            metadata_bytes: pager.tables().bytes(),
            resident_bytes_max: pager.budget().charged_max(),
            committed_bytes: ByteCount(committed.0 * page),
            stored_bytes: ByteCount(pager.slots().map().in_use().0 * page),
            bytes_read: ByteCount(counted.pages_in * page),
            bytes_written: ByteCount(counted.pages_out * page),
            reads_in_flight_max: counters.reads_in_flight.reading_max(),
            writes_in_flight_max: counters.writes_in_flight.reading_max(),
            ..counted
        }
    }
}

/// Pages read from the device.
#[cfg(feature = "heap")]
pub(in crate::paging) fn pages_in(counters: &Counters) -> u64 {
    counters.pages_in.reading()
}
