//! What will be touched next, and whether it will be written.

pub(in crate::paging) mod streams;
pub(in crate::paging) mod write_predictor;
