//! The heap: jemalloc arenas whose extents come from a region. Layer 7.

pub(crate) mod source;
