//! Memory for our own state, outside of any heap. Layer 2: uses `base`, `sys`.

pub(crate) mod lazy;
