//! Requests to both tiers while values are copied, so that both devices work meanwhile: reading ahead of
//! the copying, and writing behind it what did not go to the device whole (`Values::store_chunk`).
//!
//! Both ask for whole chunks of 2 MiB as far as they go: those are one request of the device, and are
//! mapped and taken out by one call of the kernel.

use farheap::Heap;
use farheap::region::{Advice, Region};
use std::marker::PhantomData;
use std::ptr::slice_from_raw_parts;

/// Unit that comes and goes whole, at a multiple of its size.
pub(super) const CHUNK: usize = 2 << 20;

/// Where a copy's values are when the copying ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Rest {
    /// In the tier's memory, until it needs room.
    #[default]
    InMemory,
    /// On their way to the tier's device.
    Written,
}

/// Returns the far tier that an address lies in. `None`: the memory is local, or of a process that has forked this one.
pub(super) fn tier_of(ptr: *const u8) -> Option<Heap> {
    Heap::tiers().into_iter().find(|tier| tier.region().contains(ptr))
}

/// Asks for what is copied next.
pub(super) struct ReadAhead<'a> {
    /// The tier of the values, if they are far and it is worth to ask for them.
    tier: Option<Heap>,
    begin: *const u8,
    len: usize,
    /// Bytes that have been asked for.
    asked: usize,
    /// How far ahead of the copying.
    window: usize,
    values: PhantomData<&'a [u8]>,
}

impl<'a> ReadAhead<'a> {
    /// Bytes ahead of the copying, at most: what a device of 3 GB/s reads in 3 ms, and half of the runs of
    /// frames that chunks are read into.
    pub(super) const BYTES_MAX: usize = 4 * CHUNK;

    /// Of values that may be far.
    pub(super) fn of<T>(values: &'a [T]) -> ReadAhead<'a> {
        let (begin, len) = (values.as_ptr().cast(), size_of_val(values));
        let tier = tier_of(begin);
        let window =
            tier.as_ref().map_or(0, |tier| window(tier.region())).min(ReadAhead::BYTES_MAX);
        // Less than a chunk is left to the streams that faults make.
        let tier = tier.filter(|_| window >= CHUNK);
        ReadAhead { tier, begin, len, asked: 0, window, values: PhantomData }
    }

    /// The first `bytes` have been copied.
    pub(super) fn reached(&mut self, bytes: usize) {
        let Some(tier) = &self.tier else { return };
        let wanted = match bytes + self.window {
            end if end < self.len => ends_before(self.begin, end),
            _ => self.len,
        };
        if wanted > self.asked {
            let from = self.begin.wrapping_add(self.asked);
            // Fails for ranges of others only.
            let _ = tier
                .region()
                .advise(&[slice_from_raw_parts(from, wanted - self.asked)], Advice::WillNeed);
            self.asked = wanted;
        }
    }
}

/// Returns how many bytes it is worth to read ahead of the copying, as far as the tier is concerned.
fn window(tier: &Region) -> usize {
    /// Read-ahead must not be evicted before it is used: as for streams of faults, of which
    /// there may be others.
    const LIMIT_PART: usize = 16;
    /// But a chunk where it is an eighth at most, for which there is a run of frames: with less nothing
    /// is asked for, and a migration from a tier of 16 MiB waits for each stream of faults anew.
    const CHUNK_PART: usize = 8;
    let limit = tier.stats().limit_bytes.as_usize();
    (limit / LIMIT_PART).max((limit / CHUNK_PART).min(CHUNK))
}

/// Asks for what has been copied to be written.
pub(super) struct WriteBehind<'a> {
    /// The tier of the copy, if it is far and to be written.
    tier: Option<&'a Region>,
    begin: *const u8,
    /// Bytes that were handed on.
    handed: usize,
}

impl<'a> WriteBehind<'a> {
    /// Of a copy that begins at `begin`.
    pub(super) fn of(begin: *const u8, tier: Option<&'a Region>) -> WriteBehind<'a> {
        WriteBehind { tier, begin, handed: 0 }
    }

    /// The first `bytes` have been copied, the last chunk of them straight to the device.
    pub(super) fn stored(&mut self, bytes: usize) {
        self.handed = bytes;
    }

    /// The first `bytes` have been copied, which may be all.
    pub(super) fn reached(&mut self, bytes: usize, is_all: bool) {
        let Some(tier) = self.tier else { return };
        // A chunk that is still being filled would be read again for its other half.
        let done = if is_all { bytes } else { ends_before(self.begin, bytes) };
        if done > self.handed {
            let from = self.begin.wrapping_add(self.handed);
            // As above.
            let _ = tier.advise(&[slice_from_raw_parts(from, done - self.handed)], Advice::PageOut);
            self.handed = done;
        }
    }
}

/// The last end of a chunk within the first `bytes` from `begin`, as an offset; 0: there is none.
fn ends_before(begin: *const u8, bytes: usize) -> usize {
    ((begin.addr() + bytes) & !(CHUNK - 1)).saturating_sub(begin.addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_chunks_are_found_from_any_beginning() {
        let at = |addr: usize| std::ptr::without_provenance::<u8>(addr);
        assert_eq!(ends_before(at(4 * CHUNK), CHUNK - 1), 0);
        assert_eq!(ends_before(at(4 * CHUNK), 3 * CHUNK), 3 * CHUNK);
        let odd = at(4 * CHUNK + 4096);
        assert_eq!(ends_before(odd, CHUNK - 4096), CHUNK - 4096);
        assert_eq!(ends_before(odd, 2 * CHUNK), 2 * CHUNK - 4096);
        assert_eq!(ends_before(odd, 100), 0);
    }
}
