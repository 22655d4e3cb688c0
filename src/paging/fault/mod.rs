//! Faults: the threads and the signal handler that bring pages in.

pub(in crate::paging) mod fill;
pub(in crate::paging) mod handler;
mod huge_reads;
pub(in crate::paging) mod in_memory;
mod no_room;
mod prefetch;
mod reads;
pub(in crate::paging) mod sched;
pub(in crate::paging) mod sigbus;
pub(in crate::paging) mod starved;
pub(in crate::paging) mod status;
pub(in crate::paging) mod supervisor;
mod watchdog;
