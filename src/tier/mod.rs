//! Tiers: the one limit, and which page goes next. Layer 5: uses `base`, `sys`, `meta`.

pub(crate) mod budget;
pub mod manager;
pub mod policy;
