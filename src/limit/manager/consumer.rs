//! The manager's request to consumers: to give their memory back.

use crate::base::units::ByteCount;
use crate::limit::donation::Donation;

/// Cost of freeing bytes, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReclaimCost {
    /// Memory that holds nothing.
    Free,
    /// Data that the device or the host can give again: clean pages.
    Reread,
    /// Data that has to be written first.
    WriteBack,
}

impl ReclaimCost {
    /// All of them, cheapest first.
    pub const ALL: [ReclaimCost; 3] =
        [ReclaimCost::Free, ReclaimCost::Reread, ReclaimCost::WriteBack];
}

/// A consumer that can give memory back: a buffer pool, a far heap, a host's plan or result cache.
///
/// All calls come from any thread, several at once, without a lock of the manager held. A call
/// must not touch far memory that may be absent, and a charge made from within one fails at once
/// instead of reclaiming. A call that panics is caught; the consumer is not asked again.
///
/// # Examples
/// ```
/// use farheap::manager::{Account, ReclaimCost, MemoryManager, Reclaim};
/// use farheap::ByteCount;
/// use std::sync::{Arc, Mutex, Weak};
///
/// struct PlanCache(Account, Mutex<Vec<Vec<u8>>>);
///
/// impl Reclaim for PlanCache {
///     fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
///         let mut freed = 0;
///         let mut plans = self.1.lock().unwrap_or_else(|e| e.into_inner());
///         while cost >= ReclaimCost::Reread && freed < want.get() {
///             let Some(plan) = plans.pop() else { break };
///             freed += plan.len() as u64;
///         }
///         self.0.uncharge(ByteCount(freed));
///         ByteCount(freed)
///     }
/// }
///
/// let manager = MemoryManager::start(ByteCount::mib(16))?;
/// let account = manager.join("plans")?;
/// let cache = Arc::new(PlanCache(account.clone(), Mutex::new(Vec::new())));
/// let weak: Weak<PlanCache> = Arc::downgrade(&cache);
/// account.set_reclaimer(weak);
/// manager.charge(&account, ByteCount::mib(10))?;
/// cache.1.lock().expect("no panic").push(vec![0; 10 << 20]);
/// // The plan gives way.
/// let memory = manager.allocate_temporary(ByteCount::mib(12))?;
/// assert_eq!(account.used(), ByteCount::ZERO);
/// # drop(memory);
/// # Ok::<(), farheap::Error>(())
/// ```
pub trait Reclaim: Send + Sync {
    /// Frees about `want` bytes, spending no more than `cost`, and returns how many it freed
    /// (it has uncharged them).
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount;

    /// The consumer's place in the order of those at the same cost: the lowest is asked first.
    fn order(&self, _cost: ReclaimCost) -> u32 {
        100
    }

    /// Gives memory away with its frames, in whole 2 MiB, as much as `room` wants: what a large
    /// temporary allocation is made of then needs neither be dropped nor faulted in and zeroed.
    /// For consumers of this crate; a host's cache keeps the default, which gives nothing.
    #[doc(hidden)]
    fn donate(&self, _room: &mut Donation<'_>) {}

    /// Describes the holders of what cannot be reclaimed, for messages.
    fn describe_held(&self) -> String {
        String::new()
    }

    /// Of the bytes charged, those that describe the others: page states, tables.
    fn metadata(&self) -> ByteCount {
        ByteCount::ZERO
    }

    /// Is told that the most it may charge has changed.
    fn ceiling_changed(&self, _ceiling: ByteCount) {}

    /// Is told what became of a request for room that it made without waiting: how many bytes
    /// others gave.
    fn room_made(&self, _freed: ByteCount) {}
}
