//! What a manager tells its host: events and figures.

use crate::base::units::ByteCount;
use std::fmt;
use std::sync::Arc;

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every consumer may use what the others do not.
    Cooperative,
    /// Temporary memory has a part of its own, this many percent, nothing gives way and nothing
    /// spills: the traditional system, for comparison. Consumers may have parts too
    /// ([`Account::set_part`](crate::limit::manager::Account::set_part)); the others share what is left. What is not
    /// used of a part they may borrow, and give back when it is.
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
    /// A consumer took back more than it had charged.
    Miscounted {
        /// The consumer's name.
        consumer: Arc<str>,
        /// Bytes that were not charged.
        bytes: ByteCount,
    },
    /// What consumers hold has been above the limit for a second, because memory was counted that
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
    /// Bytes it has: as `used`, or more where memory was counted that there was no room to charge.
    pub held: ByteCount,
    /// Bytes it has taken back without having charged them: a mistake of the consumer's.
    pub miscounted: ByteCount,
    /// Of the bytes charged, bytes of page states and tables.
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
    /// Bytes that all consumers have: as `used`, and what of counted memory there was no room to
    /// charge. What of it is above the limit cannot be evicted.
    pub held: ByteCount,
    /// The most the manager's thread, which looks every 50 ms, has ever seen.
    pub held_max: ByteCount,
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
    /// Bytes above the limit: counted memory that nobody can evict, or a limit that was lowered.
    #[must_use]
    pub fn over(&self) -> ByteCount {
        ByteCount(self.held.0.saturating_sub(self.limit.0))
    }

    /// A consumer's figures, by its name.
    #[must_use]
    pub fn consumer(&self, name: &str) -> Option<&ConsumerStats> {
        self.consumers.iter().find(|consumer| &*consumer.name == name)
    }
}

impl fmt::Display for ManagerStats {
    /// A table for people, one subject a line; programs use the fields.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, limit, most) = (self.held, self.limit, self.held_max.max(self.used_max));
        write!(f, "in use        {held} of {limit} (most {most})")?;
        match self.over() {
            ByteCount::ZERO => writeln!(f)?,
            over => writeln!(f, ", {over} OVER the limit")?,
        }
        for consumer in &self.consumers {
            let ConsumerStats { name, used, held, miscounted, .. } = consumer;
            write!(f, "{name:<13} {held}")?;
            if held > used {
                write!(f, ", of which there was room to charge {used}")?;
            }
            if miscounted.0 > 0 {
                write!(f, ", took back {miscounted} that it had not charged")?;
            }
            writeln!(f)?;
        }
        let [spare, clean, written] = self.reclaimed;
        writeln!(f, "reclaimed     {spare} spare, {clean} clean, {written} written")?;
        writeln!(f, "spilled       {} of temporary memory", self.spilled)?;
        writeln!(f, "errors        {} charges and allocations failed", self.failed)
    }
}
