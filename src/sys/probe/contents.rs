//! Content of a device or file: nothing, leftovers of farheap, or somebody's data.
//!
//! [`Contents::look`] takes out of the picture what is farheap's own, as its [`OwnSignature`] says. What
//! is left must be zeros.
//!
//! # Invariants
//! 1. A device with our signature is free only if all else is zero in its first and its last
//!    [`LOOKED_AT`] bytes, where partition tables, file systems, RAID and volume managers keep
//!    their first superblock. Programs that write one may leave our signature standing: partitioning
//!    tools keep the first 440 bytes, `mkfs.ext4` and `mkswap` the first 1,024.
//! 2. A regular file without our signature is free only if all of it is zero.

use crate::base::local::keep_local;
use crate::sys::buffer::Buffer;
use crate::sys::file::{self, Errno, FileKind};
use std::fmt::{self, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Bytes at the start and at the end of a device that are looked at.
pub(crate) const LOOKED_AT: u64 = 1 << 20;

/// The unit of reads and writes here: what direct I/O takes of every device that is accepted.
const BLOCK: u64 = 4096;

/// Places of a block device without our signature that are looked at between its start and its end,
/// and bytes of each: 64 reads, 10 ms on an SSD and less than a second on a disk that turns.
const SAMPLES: u64 = 64;
const SAMPLE_LEN: u64 = 64 << 10;

/// Bytes read at a time from a regular file without our signature.
const PIECE_LEN: usize = 1 << 20;

/// Where further superblocks may be that a program finds although the first ones are gone: LUKS
/// (1, 2 and 4 MiB), VMFS (1 and 2 MiB), bcachefs (2 MiB), btrfs (64 MiB and 256 GiB).
pub(crate) const SPOTS: [u64; 5] = [1 << 20, 2 << 20, 4 << 20, 64 << 20, 256 << 30];

/// Beginning of our signature. The rest of it is as [`OwnSignature::text`] writes it.
const MARK_START: &str = "farheap: evicted pages\nin bytes ";
/// End of our signature.
const MARK_END: &str = "\nThe contents of this device mean nothing once the process that used it \
    has ended.\n";

/// Beginning of a device for evicted pages: where the pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnSignature {
    /// The bytes that hold evicted pages.
    pub(crate) pages: Range<u64>,
    /// A random number of the process that uses it, where others can reach it meanwhile.
    pub(crate) run: Option<u64>,
}

/// Reads up to the length of a buffer at an offset.
pub(crate) type ReadAt<'a> = dyn FnMut(&mut Buffer, u64) -> Result<usize, Errno> + 'a;

impl OwnSignature {
    /// Our signature, to be written at the start.
    pub(crate) fn text(&self) -> String {
        let mut text = MARK_START.to_owned();
        write!(text, "{} to {}", self.pages.start, self.pages.end).expect("a string takes any");
        if let Some(run) = self.run {
            write!(text, " of run {run}").expect("a string takes any");
        }
        text + MARK_END
    }

    /// Our signature at the start of `head`, if there is one.
    fn parse(head: &[u8]) -> Option<OwnSignature> {
        let rest = head.strip_prefix(MARK_START.as_bytes())?;
        let line = rest.split(|byte| *byte == b'\n').next()?;
        let (from, rest) = std::str::from_utf8(line).ok()?.split_once(" to ")?;
        let (to, run) = rest.split_once(" of run ").unwrap_or((rest, ""));
        let pages = from.parse().ok()?..to.parse().ok()?;
        let own = OwnSignature { pages, run: run.parse().ok() };
        (own.pages.start >= BLOCK && head.starts_with(own.text().as_bytes())).then_some(own)
    }
}

/// The content of a device or file.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, or nothing at all.
    Zeros,
    /// The pages that farheap evicted in an earlier run: it may be overwritten.
    Farheap,
    /// Data of others.
    Data {
        /// Where the first byte of it is that was seen.
        offset: u64,
    },
}

impl Contents {
    /// Looks at the first and the last mebibyte and, without our signature, at all of a regular file
    /// that is not a hole, or at [`SAMPLES`] places of a block device.
    pub(crate) fn look(fd: BorrowedFd<'_>, kind: FileKind, len: u64) -> Result<Contents, Errno> {
        let mut read = |into: &mut Buffer, offset| file::read_at(fd, into, offset);
        match Contents::look_at(&mut read, kind == FileKind::Block, len)? {
            Contents::Zeros if kind != FileKind::Block => look_at_data(fd, len),
            contents => Ok(contents),
        }
    }

    /// Looks at the start of something that `read` reads, and of a device at its end and, without our signature, at
    /// places between.
    pub(crate) fn look_at(
        read: &mut ReadAt<'_>,
        is_device: bool,
        len: u64,
    ) -> Result<Contents, Errno> {
        let _ours = keep_local();
        let mut picture = Picture { len, pieces: Vec::new() };
        picture.add(read, 0, LOOKED_AT)?;
        if is_device {
            picture.add(read, tail(len), LOOKED_AT + BLOCK)?;
        }
        let own = OwnSignature::parse(&picture.pieces[0].1);
        if let Some(own) = &own {
            picture.blank(0..own.text().len() as u64);
            picture.blank(own.pages.clone());
        }
        if let Some(data) = picture.data() {
            return Ok(data);
        }
        match own {
            Some(_) => Ok(Contents::Farheap),
            None if is_device => look_at_samples(read, picture),
            None => Ok(Contents::Zeros),
        }
    }

    /// True if nobody would miss it.
    #[must_use]
    pub fn is_free(self) -> bool {
        matches!(self, Contents::Zeros | Contents::Farheap)
    }
}

/// Where the last bytes of a device begin that are looked at.
pub(crate) fn tail(len: u64) -> u64 {
    let from = len.saturating_sub(LOOKED_AT);
    from - from % BLOCK
}

/// Zeroed bytes for direct I/O.
pub(crate) fn buffer(len: usize) -> Result<Buffer, Errno> {
    // A mapping is refused for lack of address space or of mappings (mmap(2)).
    Buffer::new(len).map_err(|_| Errno(libc::ENOMEM))
}

/// A regular file without our signature: everything that was ever written to it.
fn look_at_data(fd: BorrowedFd<'_>, len: u64) -> Result<Contents, Errno> {
    let mut buffer = buffer(PIECE_LEN)?;
    let mut at = 0;
    while let Some(data) = file::next_data(fd, at)?.filter(|data| data.start < len) {
        // Extents may begin and end within a block.
        at = data.start - data.start % BLOCK;
        while at < data.end {
            let read = file::read_at(fd, &mut buffer, at)?;
            if let Some(first) = first_of_data(&buffer[..read]) {
                return Ok(Contents::Data { offset: at + first });
            }
            if read == 0 {
                return Ok(Contents::Zeros);
            }
            at += read as u64;
        }
    }
    Ok(Contents::Zeros)
}

/// A block device without our signature: where further superblocks may be, and places between.
fn look_at_samples(read: &mut ReadAt<'_>, mut picture: Picture) -> Result<Contents, Errno> {
    for spot in SPOTS {
        picture.add(read, spot, BLOCK)?;
    }
    for sample in 1..SAMPLES {
        let at = picture.len / SAMPLES * sample;
        picture.add(read, at - at % BLOCK, SAMPLE_LEN)?;
    }
    Ok(picture.data().unwrap_or(Contents::Zeros))
}

/// Where the first byte is that is not zero.
fn first_of_data(bytes: &[u8]) -> Option<u64> {
    bytes.iter().position(|byte| *byte != 0).map(|at| at as u64)
}

/// Bytes read of a device.
struct Picture {
    /// Bytes of the device.
    len: u64,
    /// Pieces with their offsets; the first is the start.
    pieces: Vec<(u64, Buffer)>,
}

impl Picture {
    /// Reads up to `len` bytes at `offset`, a multiple of a block; nothing behind the end.
    fn add(&mut self, read: &mut ReadAt<'_>, offset: u64, len: u64) -> Result<(), Errno> {
        let mut buffer = buffer(len as usize)?;
        let read = if offset < self.len { read(&mut buffer, offset)? } else { 0 };
        buffer.truncate(read);
        self.pieces.push((offset, buffer));
        Ok(())
    }

    /// Takes a range out of the picture.
    fn blank(&mut self, range: Range<u64>) {
        for (offset, bytes) in &mut self.pieces {
            let at = |place: u64| (place.saturating_sub(*offset) as usize).min(bytes.len());
            let (from, to) = (at(range.start), at(range.end));
            bytes[from..to.max(from)].fill(0);
        }
    }

    /// The first of what is left in the picture.
    fn data(&self) -> Option<Contents> {
        let in_piece = |(start, bytes): &(u64, Buffer)| Some(start + first_of_data(bytes)?);
        let offset = self.pieces.iter().filter_map(in_piece).min()?;
        Some(Contents::Data { offset })
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contents::Zeros => f.pad("zeros"),
            Contents::Farheap => f.pad("pages that farheap evicted in an earlier run"),
            Contents::Data { offset } => write!(f, "data at byte {offset}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 512 << 20;

    /// A device of [`LEN`] bytes, or what is looked at of it, that holds one thing.
    fn holding(offset: u64, bytes: &[u8]) -> Picture {
        let mut picture = Picture { len: LEN, pieces: Vec::new() };
        for (start, len) in [(0, LOOKED_AT), (tail(LEN), LOOKED_AT)] {
            picture.pieces.push((start, buffer(len as usize).expect("a small mapping")));
        }
        let spot = |at: &u64| (*at, buffer(BLOCK as usize).expect("a small mapping"));
        picture.pieces.extend(SPOTS.iter().map(spot));
        for (start, piece) in &mut picture.pieces {
            let Some(at) = offset.checked_sub(*start).map(|at| at as usize) else { continue };
            if let Some(place) = piece.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        }
        picture
    }

    #[test]
    fn data_is_named_by_its_first_byte_that_is_looked_at() {
        assert_eq!(holding(0, b"").data(), None);
        for offset in [1080, LOOKED_AT - 4, 4 << 20, 64 << 20, LEN - 4] {
            let data = holding(offset, b"data").data();
            assert_eq!(data, Some(Contents::Data { offset }));
        }
        assert_eq!(holding(LOOKED_AT + BLOCK, b"data").data(), None, "not looked at");
    }

    #[test]
    fn the_mark_is_read_back_and_nothing_else_is_taken_for_it() {
        let own = OwnSignature { pages: 1 << 20..u64::MAX, run: Some(u64::MAX) };
        let text = own.text();
        // Partitioning tools keep 440 bytes; a signature of ours that they cut would be unknown data.
        assert!(
            text.len() < 440 && text.contains("in bytes 1048576 to 18446744073709551615 of run ")
        );
        let on_device = [text.as_bytes(), &[0; 100]].concat();
        assert_eq!(OwnSignature::parse(&on_device), Some(own.clone()));
        let own = OwnSignature { run: None, ..own };
        assert_eq!(OwnSignature::parse(own.text().as_bytes()), Some(own));
        assert_eq!(OwnSignature::parse(&text.as_bytes()[..text.len() - 1]), None, "cut");
        assert_eq!(OwnSignature::parse(text.replace("1048576", "1048576x").as_bytes()), None);
        assert_eq!(
            OwnSignature::parse(text.replace("1048576", "0").as_bytes()),
            None,
            "over the mark"
        );
        assert_eq!(OwnSignature::parse(b"root:x:0:0"), None);
    }

    #[test]
    fn only_what_is_taken_out_of_the_picture_is_ignored() {
        let mut picture = holding(tail(LEN) + 10, b"page");
        picture.blank(1 << 20..tail(LEN) + 13);
        assert_eq!(picture.data(), Some(Contents::Data { offset: tail(LEN) + 13 }));
        picture.blank(0..0);
        picture.blank(tail(LEN)..u64::MAX);
        assert_eq!(picture.data(), None);
    }

    #[test]
    fn what_nobody_would_miss_is_told_from_data() {
        assert!(Contents::Zeros.is_free() && Contents::Farheap.is_free());
        assert!(!Contents::Data { offset: 0 }.is_free());
    }
}
