//! A pool's statistics.

use crate::base::statistics::statistics;

statistics! {
    /// Statistics of a pool since its start. Counts only grow; sizes are of the moment.
    pub struct PoolStats {
        "memory" {
            /// Bytes of resident pages.
            resident: bytes "resident";
            /// Of these, in huge pages; see [`PoolConfig::huge_frames`](super::PoolConfig::huge_frames).
            huge: bytes "huge";
            /// Bytes of page words, resident set and page tables, which are within the limit too.
            metadata: bytes "of tables";
            /// Bytes that the pool keeps for itself whatever it holds: queues to the device, lists,
            /// its thread's stack. Within the limit as well.
            fixed: bytes "of queues and lists";
        }
        "pages" {
            /// Fixes that found their page absent.
            misses: count "misses";
            /// Pages read.
            pages_read: count "read";
            /// Pages written.
            pages_written: count "written";
            /// Of these, by the background cleaner.
            pages_cleaned: count "by the cleaner";
            /// Pages evicted.
            evicted: count "evicted";
            /// Of these, donated to temporary memory with their frames.
            donated: count "donated";
        }
        "trouble" {
            /// Writes that failed.
            write_errors: count "failed writes";
            /// Times that [`PoolConfig::before_write`](super::PoolConfig::before_write) refused a page.
            write_refusals: count "refused writes";
        }
    }
}
