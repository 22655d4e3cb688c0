//! Pages and frames: the state word, the table of words, the staging frames. Layer 4: uses
//! `base`, `sys`, `meta`.

pub(crate) mod frames;
pub(crate) mod word;
