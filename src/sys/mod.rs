//! The only system calls of the crate. Layer 1: uses `base`.

pub(crate) mod membarrier;
