//! Pages and frames: the state word, its protocol, the staging frames. Layer 4: uses `base`,
//! `sys`, `meta`.

#[cfg(not(loom))]
pub(crate) mod frames;
#[cfg(all(test, loom))]
mod loom_model;
pub(crate) mod note;
pub(crate) mod opening;
pub(crate) mod protocol;
pub(crate) mod word;
