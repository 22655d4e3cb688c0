//! A memory pool of [DataFusion] over far memory of [farheap]: operators beyond the budget go far instead of failing.
//!
//! DataFusion's operators reserve memory of a [`MemoryPool`] before they allocate it. A hash join that is refused fails,
//! because it cannot spill. In a process whose global allocator is [`FarHeap`](farheap::FarHeap), the large blocks of an
//! operator are far memory, and leave for a device when memory is short. So a [`FarMemoryPool`] grants more than memory
//! has: first what is *near*, the budget of DataFusion's own pools, then what is *far*, as much as the device is to hold.
//! The heap's limit bounds what is resident; the pool counts, by consumer and by operator, what was granted beyond the
//! budget.
//!
//! ```text
//! near  |############|            granted first: choose what the heap may keep resident
//! far                |########....|   granted while a heap runs: choose what its device can hold beside the tables
//! ```
//! An operator that can spill, such as a sort, spills when it is refused: after `far`, or at once with a `far` of zero.
//! Without a running heap, as where userfaultfd is not permitted, nothing is far, and the pool works as DataFusion's
//! greedy one with `near`.
//!
//! # Limits
//! 1. Reservations are estimates of the operators. What they do not reserve is bounded by the heap's limit all the same.
//! 2. Only blocks of at least the heap's `threshold` are far. 16 KiB is a good one: columns of a batch are 32 KiB or more.
//! 3. Let `far` be less than the device's capacity beside the tables in far memory. Once the device is full, an allocation
//!    that was granted here is refused by the heap, and Rust ends the process.
//! 4. Consumers are counted under one lock, which a consumer takes for each batch, as in DataFusion's fair pool.
//!
//! # Examples
//! ```
//! use datafusion::execution::runtime_env::RuntimeEnvBuilder;
//! use datafusion::prelude::{SessionConfig, SessionContext};
//! use farheap::{ByteCount, FarHeap, Heap};
//! use farheap_datafusion::FarMemoryPool;
//! use std::sync::Arc;
//!
//! #[global_allocator]
//! static HEAP: FarHeap = FarHeap::new();
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let heap = Heap::builder().parse("limit:256MiB,threshold:16KiB")?.start();
//! # let _ = heap; // Where it is not permitted, the pool has near memory only.
//! let pool = Arc::new(FarMemoryPool::new(ByteCount::mib(192), ByteCount::gib(8)));
//! let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::clone(&pool) as _).build_arc()?;
//! let context = SessionContext::new_with_config_rt(SessionConfig::new(), runtime);
//! // Queries.
//! # drop(context);
//! for (operator, reserved) in pool.operators() {
//!     println!("{operator}: {reserved}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [DataFusion]: https://docs.rs/datafusion
//! [farheap]: https://docs.rs/farheap

/// Its program is compiled as those of this page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod accounts;

pub use accounts::Reserved;

use accounts::Accounts;
use datafusion_common::{Result, resources_datafusion_err};
use datafusion_execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use farheap::{ByteCount, Heap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pool of near and far memory for DataFusion's operators.
#[derive(Debug)]
pub struct FarMemoryPool {
    near: ByteCount,
    far: ByteCount,
    accounts: Mutex<Accounts>,
}

impl FarMemoryPool {
    /// Makes a pool that grants `near` bytes, and `far` bytes more while a far heap runs.
    #[must_use]
    pub fn new(near: ByteCount, far: ByteCount) -> FarMemoryPool {
        FarMemoryPool { near, far, accounts: Mutex::default() }
    }

    /// Returns what all consumers have reserved together.
    #[must_use]
    pub fn total(&self) -> Reserved {
        self.accounts().total()
    }

    /// Returns what each consumer has reserved that is registered now, in the order of registration. Each partition of an
    /// operator is one.
    #[must_use]
    pub fn consumers(&self) -> Vec<(String, Reserved)> {
        self.accounts().consumers()
    }

    /// Returns what the consumers of each operator have reserved, those that have ended included, by name: that of their
    /// consumers without partition and expressions.
    #[must_use]
    pub fn operators(&self) -> Vec<(String, Reserved)> {
        self.accounts().operators()
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // Numbers alone are changed under the lock, and a panic between two of them is one of this crate.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may be far now.
    fn far_now(&self) -> ByteCount {
        if Heap::running().is_some() { self.far } else { ByteCount::ZERO }
    }
}

impl fmt::Display for FarMemoryPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total();
        write!(f, "{}(near: {}, far: {}, {total})", self.name(), self.near, self.far)
    }
}

impl MemoryPool for FarMemoryPool {
    fn name(&self) -> &str {
        "far"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.accounts().register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.accounts().unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.accounts().grow(reservation.consumer(), additional as u64, self.near);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.accounts().shrink(reservation.consumer(), shrink as u64);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let (consumer, bytes) = (reservation.consumer(), additional as u64);
        let mut accounts = self.accounts();
        let beyond = accounts.beyond(bytes, self.near);
        // Asked only where it matters: a lock of all heaps.
        let far = if beyond == 0 { self.far } else { self.far_now() };
        if beyond == 0 || accounts.total().far_bytes.0.saturating_add(beyond) <= far.0 {
            accounts.grow(consumer, bytes, self.near);
            return Ok(());
        }
        accounts.refuse(consumer);
        let total = accounts.total();
        drop(accounts);
        let why = if far < self.far {
            "no far heap runs: start one, or raise the pool's `near`".to_owned()
        } else {
            format!("it may have {far} far: raise that if the device can hold more")
        };
        Err(resources_datafusion_err!(
            "no memory for {} more of {}, which has {}: of the pool {total}; {} are near, and {why}",
            ByteCount(bytes),
            consumer.name(),
            ByteCount(reservation.size() as u64),
            self.near
        ))
    }

    fn reserved(&self) -> usize {
        self.total().bytes.as_usize()
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.near.0.saturating_add(self.far_now().0) as usize)
    }
}
