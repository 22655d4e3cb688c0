//! A pool's statistics.

use crate::base::statistics::statistics;

/// Passes the table of a pool's statistics to a macro, behind what else is for it; `statistics!` of
/// `base` says what a row is. A new one is a row here, and the line that counts.
///
/// The order is that of the C structure.
#[doc(hidden)]
#[macro_export]
macro_rules! for_pool_stats {
    ($callback:ident $($head:tt)*) => {
        $callback! {
            $($head)*
            "memory" {
                /// Bytes of resident pages.
                resident_bytes: bytes "resident";
                /// Of the resident bytes, those in huge pages.
                huge_bytes: bytes "huge";
                /// Bytes of page words, resident set and page tables, which are within the limit
                /// too.
                metadata_bytes: bytes "of tables";
                /// Bytes that the pool keeps for itself whatever it holds: queues to the device,
                /// lists, its thread's stack. Within the limit as well.
                fixed_bytes: bytes "of queues and lists";
            }
            "pages" {
                /// Fixes that found their page absent.
                misses: count "misses";
                /// Pages read.
                pages_read: count "read";
                /// Pages written.
                pages_written: count "written";
                /// Of the pages written, those by the background cleaner.
                pages_cleaned: count "by the cleaner";
                /// Pages evicted.
                evicted: count "evicted";
                /// Of the pages evicted, those donated to temporary memory with their frames.
                donated: count "donated";
            }
            "trouble" {
                /// Writes that failed.
                write_errors: count "failed writes";
                /// Times that `before_write` refused a page.
                write_refusals: count "refused writes";
            }
        }
    };
}

for_pool_stats!(statistics (
    /// Statistics of a pool since its start. Counts only grow; sizes are of the moment.
    pub struct PoolStats;
));
