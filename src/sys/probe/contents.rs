//! What a device or file holds: nothing, what farheap left on it, or somebody's data.
//!
//! [`Contents::look`] takes out of the picture what is farheap's own, as its [`OwnSignature`] says. What
//! is left must be zeros; if it is not, [`KNOWN`] only serves to name it.
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

/// What our signature begins with. The rest of it is as [`OwnSignature::text`] writes it.
const MARK_START: &str = "farheap: evicted pages\nin bytes ";
/// What ends our signature.
const MARK_END: &str = "\nThe contents of this device mean nothing once the process that used it \
    has ended.\n";

/// What a device for evicted pages begins with: where the pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnSignature {
    /// The bytes that hold evicted pages.
    pub(crate) pages: Range<u64>,
}

impl OwnSignature {
    /// Our signature, to be written at the start.
    pub(crate) fn text(&self) -> String {
        let mut text = MARK_START.to_owned();
        write!(text, "{} to {}", self.pages.start, self.pages.end).expect("a string takes any");
        text + MARK_END
    }

    /// Our signature at the start of `head`, if there is one.
    fn parse(head: &[u8]) -> Option<OwnSignature> {
        let rest = head.strip_prefix(MARK_START.as_bytes())?;
        let line = rest.split(|byte| *byte == b'\n').next()?;
        let (from, to) = std::str::from_utf8(line).ok()?.split_once(" to ")?;
        let own = OwnSignature { pages: from.parse().ok()?..to.parse().ok()? };
        (own.pages.start >= BLOCK && head.starts_with(own.text().as_bytes())).then_some(own)
    }
}

/// Where a signature is.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Bytes from the start.
    Start(u64),
    /// Counted from the end, rounded down to a multiple of the first number: the second number of
    /// bytes before it, and the third behind that.
    End(u64, u64, u64),
}

impl At {
    fn offset(self, len: u64) -> Option<u64> {
        match self {
            At::Start(offset) => Some(offset),
            At::End(align, back, forth) => Some((len - len % align).checked_sub(back)? + forth),
        }
    }
}

const LUKS: &str = "an encrypted volume (LUKS)";
const LUKS_COPY: &str = "the second header of an encrypted volume (LUKS)";
const LVM: &str = "a physical volume of LVM";
const GPT: &str = "a partition table (GPT)";
const GPT_COPY: &str = "the copy of a partition table (GPT) at its end";
const EXT: &str = "an ext2, ext3 or ext4 file system";
const MD: &str = "a RAID member (md)";
const SWAP: &str = "swap space";
const BTRFS: &str = "a btrfs file system";
const BCACHEFS: &str = "a bcachefs file system";
const BCACHEFS_MAGIC: &[u8] = b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";
const FAT: &str = "a FAT file system";
const ZFS: &str = "a member of a ZFS pool";
const DRBD: &str = "a DRBD volume";
const VMFS: &str = "a VMFS volume";
const REISER: &str = "a reiserfs file system";

/// Signatures with their places, as `wipefs(8)` and `file(1)` look for them. Those of volumes that
/// carry a partition table as well come before that. Where two of one kind are needed to tell, the
/// one that decides is listed.
const KNOWN: &[(At, &[u8], &str)] = &[
    (At::Start(0), b"LUKS\xba\xbe", LUKS),
    (At::Start(0), b"farpool", "a table of a buffer pool (farheap)"),
    (At::Start(0), b"XFSB", "an xfs file system"),
    (At::Start(0), b"bluestore block device", "a device of Ceph (BlueStore)"),
    (At::Start(0), b"hsqs", "a squashfs file system"),
    (At::Start(0), b"verity\0\0", "hashes of dm-verity"),
    (At::Start(0), b"integrt\0", "a volume of dm-integrity"),
    (At::Start(0), b"dmvdo001", "a VDO volume"),
    (At::Start(0), b"SQLite format 3\0", "an SQLite database"),
    (At::Start(0), b"\x7fELF", "a program"),
    (At::Start(0), b"\x1f\x8b", "compressed data (gzip)"),
    (At::Start(0), b"\x28\xb5\x2f\xfd", "compressed data (zstd)"),
    (At::Start(0), b"QFI\xfb", "a disk image (qcow2)"),
    (At::Start(24), b"LABELONE", LVM),
    (At::Start(512), b"LABELONE", LVM),
    (At::Start(1024), b"LABELONE", LVM),
    (At::Start(1536), b"LABELONE", LVM),
    (At::Start(512), b"EFI PART", GPT),
    (At::Start(4096), b"EFI PART", GPT),
    (At::Start(1024 + 56), b"\x53\xef", EXT),
    (At::Start(1024), b"\x10\x20\xf5\xf2", "an f2fs file system"),
    (At::Start(1024), b"\xe2\xe1\xf5\xe0", "an erofs file system"),
    (At::Start(1024), b"H+", "an HFS+ file system"),
    (At::Start(1024), b"HX", "an HFS+ file system"),
    (At::Start(32), b"NXSB", "an APFS container"),
    (At::Start(0), b"\xfc\x4e\x2b\xa9", MD),
    (At::Start(4096), b"\xfc\x4e\x2b\xa9", MD),
    (At::End(64 << 10, 64 << 10, 0), b"\xfc\x4e\x2b\xa9", MD),
    (At::End(64 << 10, 64 << 10, 0), b"\xa9\x2b\x4e\xfc", MD),
    (At::End(4096, 8192, 0), b"\xfc\x4e\x2b\xa9", MD),
    (At::End(512, 1024, 0), b"Intel Raid ISM Cfg Sig. ", "a RAID member (Intel)"),
    (At::End(512, 512, 0), b"\xde\x11\xde\x11", "a RAID member (DDF)"),
    (At::End(4096, 4096, 60), b"\x83\x74\x02\x6b", DRBD),
    (At::End(4096, 4096, 60), b"\x83\x74\x02\x6c", DRBD),
    (At::End(4096, 4096, 60), b"\x83\x74\x02\x6d", DRBD),
    (
        At::Start(4096 + 24),
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        "a bcache device",
    ),
    (At::Start(4096 + 24), BCACHEFS_MAGIC, BCACHEFS),
    (At::Start((2 << 20) + 24), BCACHEFS_MAGIC, BCACHEFS),
    (At::End(512, 1 << 20, 24), BCACHEFS_MAGIC, BCACHEFS),
    (At::Start(4096 - 10), b"SWAPSPACE2", SWAP),
    (At::Start(8192 - 10), b"SWAPSPACE2", SWAP),
    (At::Start((16 << 10) - 10), b"SWAPSPACE2", SWAP),
    (At::Start((32 << 10) - 10), b"SWAPSPACE2", SWAP),
    (At::Start((64 << 10) - 10), b"SWAPSPACE2", SWAP),
    (At::Start(4096 - 10), b"SWAP-SPACE", SWAP),
    (At::Start(4096 - 10), b"S1SUSPEND", "a suspended system"),
    (At::Start(4096 - 10), b"S2SUSPEND", "a suspended system"),
    (At::Start(4096 - 10), b"LINHIB0001", "a suspended system"),
    (At::Start(3), b"NTFS    ", "an NTFS file system"),
    (At::Start(3), b"EXFAT   ", "an exFAT file system"),
    (At::Start(3), b"-FVE-FS-", "an encrypted volume (BitLocker)"),
    (At::Start(3), b"\0\0\0ReFS\0", "a ReFS file system"),
    (At::Start(82), b"FAT32   ", FAT),
    (At::Start(54), b"FAT16   ", FAT),
    (At::Start(54), b"FAT12   ", FAT),
    (At::Start((32 << 10) + 1), b"CD001", "an ISO 9660 file system"),
    (At::Start((32 << 10) + 1), b"BEA01", "a UDF file system"),
    (At::Start(32 << 10), b"JFS1", "a JFS file system"),
    (At::Start((64 << 10) + 64), b"_BHRfS_M", BTRFS),
    (At::Start((64 << 20) + 64), b"_BHRfS_M", BTRFS),
    (At::Start((256 << 30) + 64), b"_BHRfS_M", BTRFS),
    (At::Start((64 << 10) + 52), b"ReIsEr2Fs", REISER),
    (At::Start((64 << 10) + 52), b"ReIsEr3Fs", REISER),
    (At::Start((64 << 10) + 52), b"ReIsErFs", REISER),
    (At::Start(64 << 10), b"\x01\x16\x19\x70", "a GFS file system"),
    (At::Start(1024), b"OCFSV2", "an OCFS2 file system"),
    (At::Start(2048), b"OCFSV2", "an OCFS2 file system"),
    (At::Start(4096), b"OCFSV2", "an OCFS2 file system"),
    (At::Start(32), b"ORCLDISK", "a disk of Oracle ASM"),
    (At::Start(1024 + 6), b"\x34\x34", "a NILFS file system"),
    (At::Start(16 << 10), b"\x01\x01\0\0\0\0\0\0\0\0\0\x01", ZFS),
    (At::Start(0x1_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x4000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x8000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x2_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x4_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x8_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x10_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x20_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(0x40_0000), b"SKUL\xba\xbe", LUKS_COPY),
    (At::Start(1 << 20), b"\x0d\xd0\x01\xc0", VMFS),
    (At::Start(2 << 20), b"\x5e\xf1\xab\x2f", VMFS),
    (At::Start(257), b"ustar", "an archive (tar)"),
    (At::Start(510), b"\x55\xaa", "a partition table or boot sector"),
    (At::End(512, 512, 0), b"EFI PART", GPT_COPY),
    (At::End(4096, 4096, 0), b"EFI PART", GPT_COPY),
];

/// What a device or file holds.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, or nothing at all.
    Zeros,
    /// The pages that farheap evicted in an earlier run: it may be overwritten.
    Farheap,
    /// Data, by a signature that is known.
    Known(&'static str),
    /// Other data.
    Unknown,
}

impl Contents {
    /// Looks at the first and the last mebibyte and, without our signature, at all of a regular file
    /// that is not a hole, or at [`SAMPLES`] places of a block device.
    pub(crate) fn look(fd: BorrowedFd<'_>, kind: FileKind, len: u64) -> Result<Contents, Errno> {
        let _ours = keep_local();
        let mut picture = Picture { len, pieces: Vec::new() };
        picture.add(fd, 0, LOOKED_AT)?;
        if kind == FileKind::Block {
            picture.add(fd, tail(len), LOOKED_AT + BLOCK)?;
        }
        let own = OwnSignature::parse(&picture.pieces[0].1);
        if let Some(own) = &own {
            picture.blank(0..own.text().len() as u64);
            picture.blank(own.pages.clone());
        }
        if !picture.is_blank() {
            return Ok(picture.name());
        }
        match (own, kind) {
            (Some(_), _) => Ok(Contents::Farheap),
            (None, FileKind::Block) => look_at_samples(fd, picture),
            (None, _) => look_at_data(fd, picture.len),
        }
    }

    /// Whether nobody would miss it.
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
            if buffer[..read].iter().any(|byte| *byte != 0) {
                return Ok(Contents::Unknown);
            }
            if read == 0 {
                return Ok(Contents::Zeros);
            }
            at += read as u64;
        }
    }
    Ok(Contents::Zeros)
}

/// A block device without our signature: where known signatures may be, and places between.
fn look_at_samples(fd: BorrowedFd<'_>, mut picture: Picture) -> Result<Contents, Errno> {
    for spot in SPOTS {
        picture.add(fd, spot, BLOCK)?;
    }
    for sample in 1..SAMPLES {
        let at = picture.len / SAMPLES * sample;
        picture.add(fd, at - at % BLOCK, SAMPLE_LEN)?;
    }
    Ok(if picture.is_blank() { Contents::Zeros } else { picture.name() })
}

/// What was read of a device.
struct Picture {
    /// Bytes of the device.
    len: u64,
    /// Pieces with their offsets; the first is the start.
    pieces: Vec<(u64, Buffer)>,
}

impl Picture {
    /// Reads up to `len` bytes at `offset`, a multiple of a block; nothing behind the end.
    fn add(&mut self, fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
        let mut buffer = buffer(len as usize)?;
        let read = if offset < self.len { file::read_at(fd, &mut buffer, offset)? } else { 0 };
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

    fn is_blank(&self) -> bool {
        self.pieces.iter().all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0))
    }

    fn name(&self) -> Contents {
        let is_here = |(at, magic, _): &&(At, &[u8], &str)| {
            at.offset(self.len).is_some_and(|offset| self.has(offset, magic))
        };
        KNOWN.iter().find(is_here).map_or(Contents::Unknown, |(_, _, name)| Contents::Known(name))
    }

    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.pieces.iter().any(|(start, bytes)| {
            let from = offset.checked_sub(*start).and_then(|from| bytes.get(from as usize..));
            from.is_some_and(|rest| rest.starts_with(magic))
        })
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Contents::Zeros => "zeros",
            Contents::Farheap => "pages that farheap evicted in an earlier run",
            Contents::Known(name) => name,
            Contents::Unknown => "data of an unknown kind",
        })
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
    fn every_signature_is_recognized_at_its_place_only() {
        for (at, magic, name) in KNOWN {
            let offset = at.offset(LEN).expect("a large device");
            let picture = holding(offset, magic);
            assert!(!picture.is_blank(), "{name} at {offset} is not looked at");
            assert_eq!(picture.name(), Contents::Known(name), "at {offset}");
            let moved = holding(offset + 1, magic);
            assert!(!moved.is_blank(), "{name} at {offset}");
            assert_ne!(moved.name(), Contents::Known(name), "at {offset}, moved");
        }
    }

    #[test]
    fn places_at_the_end_count_from_the_rounded_end() {
        assert_eq!(At::End(64 << 10, 64 << 10, 0).offset((1 << 20) + 5), Some((1 << 20) - 65536));
        assert_eq!(At::End(512, 1024, 3).offset(2048 + 511), Some(1024 + 3));
        assert_eq!(At::End(4096, 8192, 0).offset(4096), None);
    }

    #[test]
    fn the_mark_is_read_back_and_nothing_else_is_taken_for_it() {
        let own = OwnSignature { pages: 1 << 20..u64::MAX };
        let text = own.text();
        // Partitioning tools keep 440 bytes; a signature of ours that they cut would be unknown data.
        assert!(text.len() < 440 && text.contains("in bytes 1048576 to 18446744073709551615\n"));
        let on_device = [text.as_bytes(), &[0; 100]].concat();
        assert_eq!(OwnSignature::parse(&on_device), Some(own));
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
        assert!(!picture.is_blank());
        picture.blank(0..0);
        picture.blank(tail(LEN)..u64::MAX);
        assert!(picture.is_blank());
    }

    #[test]
    fn what_nobody_would_miss_is_told_from_data() {
        assert!(Contents::Zeros.is_free() && Contents::Farheap.is_free());
        assert!(!Contents::Unknown.is_free() && !Contents::Known("data").is_free());
    }
}
