//! The one limit: budget, admission, memory manager. Uses `base`, `sys`, `meta`.

pub(crate) mod admission;
pub(crate) mod budget;
#[cfg(not(loom))]
pub(crate) mod donation;
#[cfg(not(loom))]
pub mod manager;
