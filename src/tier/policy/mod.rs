//! Eviction policies (stand-in).
use crate::base::units::PageId;
use std::collections::VecDeque;
use std::fmt::Debug;

/// How a page became resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insert { /// Zero-filled.
    Fresh, /// Read.
    Filled, /// Read ahead.
    Prefetched }

/// Decides which resident page goes next.
pub trait EvictionPolicy: Send + Debug {
    /// Became resident.
    fn inserted(&mut self, page: PageId, how: Insert);
    /// Touched again before it left.
    fn retouched(&mut self, page: PageId);
    /// Discarded.
    fn removed(&mut self, page: PageId);
    /// Takes up to `want` pages off.
    fn victims(&mut self, want: usize, out: &mut dyn FnMut(PageId));
    /// Really left.
    fn evicted(&mut self, page: PageId);
    /// Resident pages.
    fn resident(&self) -> usize;
}

/// First in, first out.
#[derive(Debug, Default)]
pub struct Fifo(VecDeque<PageId>);
impl EvictionPolicy for Fifo {
    fn inserted(&mut self, page: PageId, _how: Insert) { self.0.push_back(page); }
    fn retouched(&mut self, page: PageId) { self.0.push_back(page); }
    fn removed(&mut self, page: PageId) { if let Some(at) = self.0.iter().position(|p| *p == page) { self.0.remove(at); } }
    fn victims(&mut self, want: usize, out: &mut dyn FnMut(PageId)) { for _ in 0..want { match self.0.pop_front() { Some(p) => out(p), None => break } } }
    fn evicted(&mut self, _page: PageId) {}
    fn resident(&self) -> usize { self.0.len() }
}
