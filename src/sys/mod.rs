//! The only system calls of the crate. Layer 1: uses `base`.

#![expect(clippy::disallowed_methods, reason = "system calls are made here and nowhere else")]

pub mod probe;
