//! A manager's reports to its host about pressure.

use crate::base::units::ByteCount;
use std::sync::Arc;

/// Report to the host about memory pressure.
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
    /// A consumer took back more than it had charged.
    Miscounted {
        /// The consumer's name.
        consumer: Arc<str>,
        /// Bytes that were not charged.
        bytes: ByteCount,
    },
    /// Memory of consumers has been above the limit for a second, because memory was counted that
    /// exists already and cannot be evicted, such as local memory. Told again only after it has
    /// been below the limit.
    Over {
        /// Bytes that exist.
        held: ByteCount,
        /// The limit.
        limit: ByteCount,
        /// The consumer that holds most of what cannot be evicted.
        consumer: Arc<str>,
    },
    /// A consumer's reclaimer panicked; it is not asked any more.
    Broken {
        /// The consumer's name.
        consumer: Arc<str>,
    },
}
