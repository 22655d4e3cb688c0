//! The buffers of a queue's requests, in the kernel's form.
//!
//! Most requests have one buffer. Those of a buffer pool all do, and each of its tables has queues: room for
//! [`SEGMENTS_MAX`] buffers of each request took 64 of their 95 KiB.
#![expect(unsafe_code, reason = "says that a buffer of no bytes is all zeros")]

use super::{Request, SEGMENTS_MAX};
use crate::base::error::Result;
use crate::meta::{LazyArray, Zeroed};
use crate::sys::file::IoVec;

// SAFETY: no address and no bytes; it has nothing to drop.
unsafe impl Zeroed for IoVec {}

/// The buffers of requests, by the requests' index.
#[derive(Debug)]
pub(super) struct Vectors {
    single: Box<[IoVec]>,
    /// [`SEGMENTS_MAX`] for each index; takes RAM where a request has had several.
    several: LazyArray<IoVec>,
}

impl Vectors {
    /// Bytes for each request, of requests of up to `segments` buffers.
    pub(super) const fn bytes(segments: usize) -> usize {
        size_of::<IoVec>() * if segments > 1 { 1 + SEGMENTS_MAX } else { 1 }
    }

    /// Room for `depth` requests.
    ///
    /// # Errors
    /// When the address space is exhausted.
    pub(super) fn new(depth: u32) -> Result<Vectors> {
        let depth = depth as usize;
        let single = vec![IoVec::EMPTY; depth].into_boxed_slice();
        Ok(Vectors { single, several: LazyArray::new(depth * SEGMENTS_MAX)? })
    }

    /// Notes the buffers of a request; returns their number.
    pub(super) fn set(&mut self, index: usize, request: &Request<'_>) -> usize {
        let count = request.segments.len();
        for (iovec, segment) in self.get(index, count).iter_mut().zip(request.segments) {
            *iovec = IoVec::new(segment.cast(), segment.len());
        }
        count
    }

    /// The buffers of a request that has `count`.
    pub(super) fn get(&mut self, index: usize, count: usize) -> &mut [IoVec] {
        match count {
            1 => &mut self.single[index..=index],
            _ => &mut self.several[index * SEGMENTS_MAX..][..count],
        }
    }
}
