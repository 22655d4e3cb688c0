//! Faults: the threads and the signal handler that bring pages in.

pub(in crate::paging) mod handler;
pub(in crate::paging) mod huge_reads;
pub(in crate::paging) mod in_memory;
mod prefetch;
pub(in crate::paging) mod reads;
pub(in crate::paging) mod sched;
pub(in crate::paging) mod sigbus;
pub(in crate::paging) mod supervisor;
