//! The only system calls of the crate: files and devices, io_uring, memory mappings. Layer 1.
//!
//! A wrapper takes the crate's types, retries `EINTR`, and returns an [`Errno`](file::Errno) that
//! its caller turns into an error with a meaning.

pub(crate) mod anon;
#[cfg_attr(not(test), expect(dead_code, reason = "the region wakes its threads by events"))]
pub(crate) mod event;
pub(crate) mod file;
pub(crate) mod uring;
