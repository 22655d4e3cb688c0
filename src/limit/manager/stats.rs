//! A manager's statistics, and those of its consumers.

use crate::base::counter::Counter;
use crate::base::statistics::statistics;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering};
use crate::base::units::ByteCount;

/// Passes the table of a manager's statistics to a macro, behind what else is for it; `statistics!`
/// of `base` says what a row is. A new one is a row and a counter here, and the line that counts.
///
/// The order is that of the C structure.
#[doc(hidden)]
#[macro_export]
macro_rules! for_manager_stats {
    ($callback:ident $($head:tt)*) => {
        $callback! {
            $($head)*
            "memory" {
                /// The limit.
                limit_bytes: bytes "the limit";
                /// Bytes charged by all consumers.
                used_bytes: bytes "used";
                /// Largest number of charged bytes there ever was.
                used_bytes_max: bytes "the most used";
                /// Bytes that all consumers have: those charged, and what of counted memory there
                /// was no room to charge. What of it is above the limit cannot be evicted.
                held_bytes: bytes "held";
                /// Largest number of held bytes that the manager's thread, which looks every 50 ms,
                /// has ever seen.
                held_bytes_max: bytes "the most held";
                /// Bytes held above the limit: counted memory that nobody can evict, or a limit that
                /// was lowered.
                over_bytes: bytes "OVER the limit";
                /// Bytes of temporary memory, within the limit.
                temporary_bytes: bytes "of temporary memory";
                /// Bytes of temporary memory beyond the limit, at the moment.
                spilled_bytes: bytes "of it spilled";
            }
            "reclaimed" {
                /// Bytes reclaimed that held nothing.
                reclaimed_free_bytes: total "free";
                /// Bytes reclaimed whose data can be read again.
                reclaimed_reread_bytes: total "reread";
                /// Bytes reclaimed whose data had to be written first.
                reclaimed_write_back_bytes: total "write-back";
            }
            "work" {
                /// Charges that had to reclaim themselves.
                direct: count "charges reclaimed themselves";
                /// Rounds of background reclaim.
                background: count "rounds in the background";
                /// Consumers that have joined and not left, temporary memory included.
                consumers: level "consumers";
            }
            "trouble" {
                /// Charges and allocations that got an error.
                failed: count "charges and allocations failed";
            }
        }
    };
}

/// As [`for_manager_stats!`](crate::for_manager_stats), of the statistics of one consumer.
#[doc(hidden)]
#[macro_export]
macro_rules! for_consumer_stats {
    ($callback:ident $($head:tt)*) => {
        $callback! {
            $($head)*
            "memory" {
                /// Bytes charged.
                used_bytes: bytes "used";
                /// Largest number of bytes it ever had charged.
                used_bytes_max: bytes "the most used";
                /// Of the bytes charged, those of page states and tables.
                metadata_bytes: bytes "of tables";
                /// Bytes it has: those charged, and what was counted without room to charge it.
                held_bytes: bytes "held";
                /// Bytes that others cannot take from it.
                floor_bytes: bytes "the floor";
                /// Maximum number of bytes it may charge.
                ceiling_bytes: bytes "the ceiling";
            }
            "gave way" {
                /// Bytes reclaimed from it.
                reclaimed_bytes: total "reclaimed";
            }
            "trouble" {
                /// Bytes it has taken back without having charged them: a mistake of the consumer's.
                miscounted_bytes: total "taken back that it had not charged";
            }
        }
    };
}

for_manager_stats!(statistics (
    /// Statistics of a memory manager since its start. Counts only grow; sizes are of the moment.
    pub struct ManagerStats;
));

for_consumer_stats!(statistics (
    /// Statistics of one consumer of a memory manager, since it joined.
    pub struct ConsumerStats;
));

/// Counters of a manager.
#[derive(Debug, Default)]
pub(super) struct ManagerCounts {
    /// Bytes, by cost.
    pub(super) reclaimed: [Counter; 3],
    pub(super) direct: Counter,
    pub(super) background: Counter,
    pub(super) failed: Counter,
    /// Bytes of temporary memory beyond the limit.
    pub(super) spilled: AtomicU64,
    /// Largest number of bytes that the manager's thread has seen all consumers have.
    pub(super) held_max: AtomicU64,
}

/// Counters of one consumer.
#[derive(Debug, Default)]
pub(super) struct ConsumerCounts {
    /// Bytes reclaimed from it.
    pub(super) gave: Counter,
    /// Bytes taken back that were not charged.
    pub(super) miscounted: Counter,
    /// A line on standard error said so.
    pub(super) miscount_told: AtomicBool,
}

impl ManagerCounts {
    pub(super) fn show(&self, stats: &mut ManagerStats) {
        let [free, reread, write_back] =
            [0, 1, 2].map(|at| ByteCount(self.reclaimed[at].reading()));
        stats.reclaimed_free_bytes = free;
        stats.reclaimed_reread_bytes = reread;
        stats.reclaimed_write_back_bytes = write_back;
        stats.direct = self.direct.reading();
        stats.background = self.background.reading();
        stats.failed = self.failed.reading();
        stats.spilled_bytes = ByteCount(self.spilled.load(Ordering::Relaxed));
        let seen = ByteCount(self.held_max.load(Ordering::Relaxed));
        stats.held_bytes_max = seen.max(stats.held_bytes);
    }
}

impl ConsumerCounts {
    pub(super) fn show(&self, stats: &mut ConsumerStats) {
        stats.reclaimed_bytes = ByteCount(self.gave.reading());
        stats.miscounted_bytes = ByteCount(self.miscounted.reading());
    }
}
