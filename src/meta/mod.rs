//! Memory for our own state, outside of any heap. Uses `base`, `sys`.

mod lazy;

pub(crate) use lazy::{LazyArray, Zeroed};
