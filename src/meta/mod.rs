//! Memory for our own state, outside of any heap. Layer 2: uses `base`, `sys`.

mod lazy;

pub(crate) use lazy::{LazyArray, Zeroed};
