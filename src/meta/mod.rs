//! Memory for our own state, which must never come from the heap we serve. Layer 2: uses `base`
//! and `sys`.

mod map;

pub(crate) use map::LazyArray;
