//! Requests that a queue has accepted and hands on to another store's queue, whole or in pieces.
//!
//! [`Pending`] is what the queues of `encrypted` know of their requests: which are accepted, how much of each is
//! handed on, and what has failed.
//!
//! # Invariants
//! 1. An index is free, or that of one request that is not reported.
//! 2. A request's buffers are used until it is reported, and no longer.

#![expect(unsafe_code, reason = "copies from the buffers of requests")]

use super::{Op, Request, SEGMENTS_MAX};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use std::collections::VecDeque;
use std::ptr::{null_mut, slice_from_raw_parts_mut};

/// An accepted request.
#[derive(Clone, Debug)]
pub(super) struct PendingRequest {
    token: u64,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: u64,
    segments: [*mut [u8]; SEGMENTS_MAX],
    count: usize,
    /// Bytes that are dealt with, or handed to the inner queue.
    pub(super) handed: u64,
    /// Requests of the inner queue that are not finished.
    pub(super) pieces: u32,
    pub(super) failure: Option<Error>,
}

impl PendingRequest {
    const EMPTY: PendingRequest = PendingRequest {
        token: 0,
        op: Op::Read,
        offset: 0,
        len: 0,
        segments: [slice_from_raw_parts_mut(null_mut(), 0); SEGMENTS_MAX],
        count: 0,
        handed: 0,
        pieces: 0,
        failure: None,
    };

    /// The caller's buffers.
    pub(super) fn segments(&self) -> &[*mut [u8]] {
        &self.segments[..self.count]
    }

    /// Copies what the caller's buffers hold from `at`.
    pub(super) fn copy_to(&self, at: u64, mut into: &mut [u8]) {
        let mut at = at as usize;
        for segment in self.segments() {
            let here = into.len().min(segment.len().saturating_sub(at));
            let (part, rest) = into.split_at_mut(here);
            if here > 0 {
                // SAFETY: within the segment.
                let from = unsafe { segment.cast::<u8>().add(at) };
                // SAFETY: the caller of `push` keeps its buffers unchanged until the request is reported
                // (invariant 2); `part` is the queue's own.
                unsafe { part.as_mut_ptr().copy_from_nonoverlapping(from, here) };
            }
            (into, at) = (rest, at.saturating_sub(segment.len()));
        }
    }

    /// True if nothing of it is left to be handed on.
    pub(super) fn is_handed(&self) -> bool {
        self.handed == self.len || self.failure.is_some()
    }

    pub(super) fn is_done(&self) -> bool {
        self.pieces == 0 && self.is_handed()
    }
}

/// The requests of a queue.
#[derive(Debug)]
pub(super) struct Pending {
    entries: Box<[PendingRequest]>,
    free: Vec<usize>,
    /// Those that are not handed on whole, oldest first.
    waiting: VecDeque<usize>,
    /// Those that are done, and not reported.
    finished: VecDeque<usize>,
}

// SAFETY: entries only remember the buffers of requests, whose owners let the queue use them from
// whichever thread the queue is on (`Queue::push`, `Queue: Send`).
unsafe impl Send for Pending {}

impl Pending {
    /// Bytes for each request.
    pub(super) const REQUEST: usize = size_of::<PendingRequest>() + 3 * size_of::<usize>();

    pub(super) fn new(depth: u32) -> Pending {
        Pending {
            entries: vec![PendingRequest::EMPTY; depth as usize].into(),
            free: (0..depth as usize).rev().collect(),
            waiting: VecDeque::with_capacity(depth as usize),
            finished: VecDeque::with_capacity(depth as usize),
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32
    }

    /// Accepts a request for a store of `capacity`. `None`: the queue is full.
    ///
    /// # Panics
    /// When a store of that capacity cannot be given such a request.
    pub(super) fn accept(&mut self, request: &Request<'_>, capacity: ByteCount) -> Option<usize> {
        let len = request.check(capacity);
        let index = self.free.pop()?;
        let entry = &mut self.entries[index];
        (entry.token, entry.op) = (request.token, request.op);
        (entry.offset, entry.len) = (request.offset, len);
        (entry.handed, entry.pieces, entry.failure) = (0, 0, None);
        entry.count = request.segments.len();
        entry.segments[..entry.count].copy_from_slice(request.segments);
        Some(index)
    }

    pub(super) fn entry(&self, index: usize) -> &PendingRequest {
        &self.entries[index]
    }

    pub(super) fn entry_mut(&mut self, index: usize) -> &mut PendingRequest {
        &mut self.entries[index]
    }

    /// The request is to be handed on after those that wait.
    pub(super) fn wait(&mut self, index: usize) {
        self.waiting.push_back(index);
    }

    /// The request that is to be handed on first.
    pub(super) fn first_waiting(&self) -> Option<usize> {
        self.waiting.front().copied()
    }

    /// The first request is handed on whole, and waits no more.
    pub(super) fn end_first_wait(&mut self) {
        self.waiting.pop_front();
    }

    /// Books what became of a piece of a request. The rest of one that failed is not handed on any more.
    pub(super) fn settle(&mut self, index: usize, result: Result<()>) {
        let entry = &mut self.entries[index];
        entry.pieces -= 1;
        entry.failure = entry.failure.take().or(result.err());
        if entry.is_done() {
            self.waiting.retain(|waiting| *waiting != index);
            self.finished.push_back(index);
        }
    }

    /// Reports what is done.
    pub(super) fn report(&mut self, done: &mut dyn FnMut(u64, Result<()>)) {
        while let Some(index) = self.finished.pop_front() {
            self.free.push(index);
            let entry = &mut self.entries[index];
            let result = entry.failure.take().map_or(Ok(()), Err);
            done(entry.token, result);
        }
    }
}
