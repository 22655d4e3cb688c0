//! Records of the index: a vector and the links of all its layers, as 32-bit words.
//!
//! ```text
//! vector f32 x dimensions | count, ids x 2 links (layer 0) | count, ids x links (layer 1) | ...
//! ```
//! # Invariants
//! 1. A [`Record`] points to words that are all initialised, from [`Record::create`] until its
//!    memory is freed; only its index uses it, and changes it under the index's `&mut`.
//! 2. The count of a list is at most its capacity.
#![expect(unsafe_code, reason = "reads and writes records through raw pointers")]

use std::alloc::Layout;
use std::ptr::NonNull;

/// How records are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) dimensions: usize,
    /// Links of a record in a layer above the lowest; the lowest has twice as many.
    pub(crate) links: usize,
}

impl Shape {
    /// Maximum number of links of a record in a layer.
    pub(crate) fn links_max(self, layer: u8) -> usize {
        if layer == 0 { 2 * self.links } else { self.links }
    }

    /// Position of a layer's count; with `level + 1`, the words of the record.
    fn list_at(self, layer: u8) -> usize {
        let below = usize::from(layer) * (1 + self.links);
        let lowest = if layer == 0 { 0 } else { self.links };
        self.dimensions + below + lowest
    }

    /// Memory of a record whose highest layer is `level`.
    pub(crate) fn layout(self, level: u8) -> Layout {
        Layout::array::<u32>(self.list_at(level + 1)).expect("a vector and its links")
    }
}

/// A record, by its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record(NonNull<u32>);

impl Record {
    /// Makes a record without links.
    ///
    /// # Safety
    /// The memory is valid for writes of the shape's layout of this level, and the record's own.
    ///
    /// # Panics
    /// When the vector has another number of dimensions than the shape.
    pub(crate) unsafe fn create(
        memory: NonNull<u8>,
        shape: Shape,
        level: u8,
        vector: &[f32],
    ) -> Record {
        assert_eq!(vector.len(), shape.dimensions, "dimensions of the vector");
        let record = Record(memory.cast());
        let links = record.0.as_ptr().wrapping_add(shape.dimensions);
        let count = shape.list_at(level + 1) - shape.dimensions;
        // SAFETY: the caller gives memory for that number of words behind the vector.
        unsafe { links.write_bytes(0, count) };
        let words = record.0.as_ptr().cast::<f32>();
        // SAFETY: the caller gives memory for the vector, which is of this length (checked above).
        unsafe { words.copy_from_nonoverlapping(vector.as_ptr(), vector.len()) };
        record
    }

    /// Copies the record to new memory, where it lives on or is a record of another index.
    ///
    /// # Safety
    /// As [`create`](Record::create), and `level` is this record's.
    pub(crate) unsafe fn copy_to(self, memory: NonNull<u8>, shape: Shape, level: u8) -> Record {
        let size = shape.layout(level).size();
        // SAFETY: both have this layout; fresh memory does not overlap.
        unsafe { memory.as_ptr().copy_from_nonoverlapping(self.as_ptr(), size) };
        Record(memory.cast())
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr().cast()
    }

    pub(crate) fn memory(self) -> NonNull<u8> {
        self.0.cast()
    }

    /// The vector; the caller borrows it no longer than the index stays as it is.
    pub(crate) fn vector<'a>(self, shape: Shape) -> &'a [f32] {
        // SAFETY: initialised words (invariant 1), and every word is an `f32`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), shape.dimensions) }
    }

    /// The links in a layer that the record has; borrowed as [`vector`](Record::vector).
    pub(crate) fn links<'a>(self, shape: Shape, layer: u8) -> &'a [u32] {
        let list = self.0.as_ptr().wrapping_add(shape.list_at(layer));
        // SAFETY: an initialised word of the record (invariant 1).
        let count = unsafe { list.read() } as usize;
        debug_assert!(count <= shape.links_max(layer), "{count} links");
        // SAFETY: the list has its capacity of initialised words, and no more are counted.
        unsafe { std::slice::from_raw_parts(list.wrapping_add(1), count) }
    }

    /// Replaces the links in a layer that the record has.
    pub(crate) fn set_links(self, shape: Shape, layer: u8, links: &[u32]) {
        assert!(links.len() <= shape.links_max(layer), "{} links", links.len());
        let list = self.0.as_ptr().wrapping_add(shape.list_at(layer));
        // SAFETY: a word of the record, which nobody borrows under the index's `&mut`.
        unsafe { list.write(links.len() as u32) };
        // SAFETY: as above, within the list's capacity (checked above).
        unsafe { list.wrapping_add(1).copy_from_nonoverlapping(links.as_ptr(), links.len()) };
    }
}
