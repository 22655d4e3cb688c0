//! Tiers: which memory stays and which goes. Layer 5: uses `base` and `meta`.

pub mod policy;
