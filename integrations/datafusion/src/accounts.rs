//! What consumers and operators have reserved, near and far.
//!
//! # Invariants
//! 1. The pool's numbers are the sums of the consumers', and so are each operator's.
//! 2. What is near of all together is the pool's `near` at most.

use datafusion_execution::memory_pool::MemoryConsumer;
use farheap::ByteCount;
use std::collections::BTreeMap;
use std::fmt;

/// Reserved memory of a consumer, an operator or a pool.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Bytes reserved now.
    pub bytes: ByteCount,
    /// Maximum of `bytes`.
    pub bytes_max: ByteCount,
    /// Bytes of `bytes` that were granted beyond the pool's near memory.
    pub far_bytes: ByteCount,
    /// Maximum of `far_bytes`.
    pub far_bytes_max: ByteCount,
    /// Reservations that were refused. An operator that can spill does that then, others fail.
    pub refused: u64,
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reserved { bytes, bytes_max, far_bytes, far_bytes_max, refused } = self;
        write!(
            f,
            "{bytes} reserved (at most {bytes_max}), {far_bytes} of it far (at most {far_bytes_max}), {refused} refused"
        )
    }
}

impl Reserved {
    fn add(&mut self, bytes: u64, far: u64) {
        self.bytes.0 += bytes;
        self.far_bytes.0 += far;
        self.bytes_max = self.bytes_max.max(self.bytes);
        self.far_bytes_max = self.far_bytes_max.max(self.far_bytes);
    }

    fn subtract(&mut self, bytes: u64, far: u64) {
        self.bytes.0 = self.bytes.0.checked_sub(bytes).expect("no more than was reserved");
        self.far_bytes.0 = self.far_bytes.0.checked_sub(far).expect("a part of that");
    }
}

#[derive(Debug)]
struct Consumer {
    name: String,
    /// Of its operator.
    operator: String,
    reserved: Reserved,
}

/// See [module](self).
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    total: Reserved,
    /// By the number that DataFusion gives each.
    consumers: BTreeMap<usize, Consumer>,
    operators: BTreeMap<String, Reserved>,
}

/// The name of a consumer's operator: `HashJoinInput` of `HashJoinInput[3]`. There are few of them, however many
/// queries run.
fn operator(consumer: &str) -> &str {
    consumer.split(['[', '(', ' ']).next().unwrap_or(consumer)
}

impl Accounts {
    pub(crate) fn total(&self) -> Reserved {
        self.total
    }

    pub(crate) fn consumers(&self) -> Vec<(String, Reserved)> {
        self.consumers.values().map(|one| (one.name.clone(), one.reserved)).collect()
    }

    pub(crate) fn operators(&self) -> Vec<(String, Reserved)> {
        self.operators.iter().map(|(name, reserved)| (name.clone(), *reserved)).collect()
    }

    pub(crate) fn register(&mut self, consumer: &MemoryConsumer) {
        self.with(consumer, |_| ());
    }

    /// Forgets a consumer, which has given everything back; its operator is kept.
    pub(crate) fn unregister(&mut self, consumer: &MemoryConsumer) {
        self.consumers.remove(&consumer.id());
    }

    /// Bytes of a reservation that would be beyond the pool's `near` memory.
    pub(crate) fn beyond(&self, bytes: u64, near: ByteCount) -> u64 {
        let used = self.total.bytes.0 - self.total.far_bytes.0;
        bytes.saturating_sub(near.0 - used)
    }

    pub(crate) fn grow(&mut self, consumer: &MemoryConsumer, bytes: u64, near: ByteCount) {
        let far = self.beyond(bytes, near);
        self.with(consumer, |reserved| reserved.add(bytes, far));
    }

    /// Gives back what is far of the consumer first: that is why it had to wait for the device.
    pub(crate) fn shrink(&mut self, consumer: &MemoryConsumer, bytes: u64) {
        let far = self.consumers.get(&consumer.id()).map_or(0, |one| one.reserved.far_bytes.0);
        self.with(consumer, |reserved| reserved.subtract(bytes, far.min(bytes)));
    }

    pub(crate) fn refuse(&mut self, consumer: &MemoryConsumer) {
        self.with(consumer, |reserved| reserved.refused += 1);
    }

    /// Changes the numbers of a consumer, of its operator and of the pool in the same way.
    fn with(&mut self, consumer: &MemoryConsumer, change: impl Fn(&mut Reserved)) {
        let one = self.consumers.entry(consumer.id()).or_insert_with(|| Consumer {
            name: consumer.name().to_owned(),
            operator: operator(consumer.name()).to_owned(),
            reserved: Reserved::default(),
        });
        change(&mut one.reserved);
        match self.operators.get_mut(&one.operator) {
            Some(operator) => change(operator),
            None => change(self.operators.entry(one.operator.clone()).or_default()),
        }
        change(&mut self.total);
    }
}
