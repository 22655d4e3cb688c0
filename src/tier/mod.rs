//! Tiers: the one limit, and which page goes next. Layer 5: uses `base`, `sys`, `meta`.

pub(crate) mod budget;
pub(crate) mod claim;
#[cfg(not(loom))]
pub(crate) mod hand_over;
#[cfg(not(loom))]
pub mod manager;
#[cfg(not(loom))]
pub mod policy;
