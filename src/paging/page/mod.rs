//! Pages and frames: the state word, its protocol, the staging frames. Uses `base`,
//! `sys`, `meta`.

pub(crate) mod chunk_state;
#[cfg(not(loom))]
pub(crate) mod frames;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod note;
pub(crate) mod protocol;
pub(crate) mod word;
