//! A pool's statistics.

use crate::base::units::ByteCount;

/// A pool's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of resident pages.
    pub resident: ByteCount,
    /// Of these, in huge pages; see [`PoolConfig::huge_frames`](super::PoolConfig::huge_frames).
    pub huge: ByteCount,
    /// Bytes of page words, resident set and page tables, which are within the limit too.
    pub metadata: ByteCount,
    /// Bytes that the pool keeps for itself whatever it holds: queues to the device, lists, its
    /// thread's stack. Within the limit as well.
    pub fixed: ByteCount,
    /// Fixes that found their page absent.
    pub misses: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Of these, by the background cleaner.
    pub pages_cleaned: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Of these, donated to temporary memory with their frames.
    pub donated: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Times that [`PoolConfig::before_write`](super::PoolConfig::before_write) refused a page.
    pub write_refusals: u64,
}
