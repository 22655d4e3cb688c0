//! When and where a fault handler runs; what it does is in `fault`.

pub(in crate::paging) mod active_set;
pub(in crate::paging) mod affinity;
pub(in crate::paging) mod busy_poll;
pub(in crate::paging) mod idle_policy;
