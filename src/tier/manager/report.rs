//! What a manager tells its host: events and figures.

use crate::base::units::ByteCount;
use std::sync::Arc;

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every consumer may use what the others do not.
    Cooperative,
    /// Temporary memory has a part of its own, this many percent, nothing gives way and nothing
    /// spills: the traditional system, for comparison. Consumers may have parts too
    /// ([`Account::set_part`](super::Account::set_part)); the others share what is left.
    Partitioned {
        /// The temporary memory's part.
        temporary_pct: u8,
    },
}

/// What the host is told about memory pressure.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pressure {
    /// Less is free than the low watermark: background reclaim begins.
    Low {
        /// Bytes charged.
        used: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// A caller has to reclaim itself.
    Direct {
        /// Bytes it wants.
        wanted: ByteCount,
    },
    /// Temporary memory went beyond the limit.
    Spilled {
        /// Bytes of the allocation.
        len: ByteCount,
    },
    /// A caller got an error.
    Failed {
        /// Bytes it wanted.
        wanted: ByteCount,
    },
    /// A consumer's reclaimer panicked; it is not asked any more.
    Broken {
        /// The consumer's name.
        consumer: Arc<str>,
    },
}

/// A consumer's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerStats {
    /// The name it joined with.
    pub name: Arc<str>,
    /// Bytes charged.
    pub used: ByteCount,
    /// The most it ever had charged.
    pub used_max: ByteCount,
    /// Of these, bytes of page states and tables.
    pub metadata: ByteCount,
    /// Bytes reclaimed from it.
    pub reclaimed: ByteCount,
    /// Bytes that others cannot take from it.
    pub floor: ByteCount,
    /// The most it may charge.
    pub ceiling: ByteCount,
}

/// The manager's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ManagerStats {
    /// The limit.
    pub limit: ByteCount,
    /// Bytes charged by all consumers.
    pub used: ByteCount,
    /// The most there ever were.
    pub used_max: ByteCount,
    /// Bytes reclaimed at each effort: spare, clean, written.
    pub reclaimed: [ByteCount; 3],
    /// Charges that had to reclaim themselves.
    pub direct: u64,
    /// Rounds of background reclaim.
    pub background: u64,
    /// Charges and allocations that got an error.
    pub failed: u64,
    /// Bytes of temporary memory beyond the limit, at the moment.
    pub spilled: ByteCount,
    /// Per consumer, in the order they joined; temporary memory is the first.
    pub consumers: Vec<ConsumerStats>,
}

impl ManagerStats {
    /// A consumer's figures, by its name.
    #[must_use]
    pub fn consumer(&self, name: &str) -> Option<&ConsumerStats> {
        self.consumers.iter().find(|consumer| &*consumer.name == name)
    }
}
