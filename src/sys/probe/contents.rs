//! What a device or file begins with: nothing, farheap's mark, or somebody's data.

use std::fmt;

/// Bytes from the start that tell: enough for the superblocks of the common file systems, volume
/// managers and partition tables.
pub(crate) const HEAD_LEN: usize = 128 << 10;

/// What a device for evicted pages begins with.
pub(crate) const MARK: &[u8] = b"farheap: evicted pages\n\
    The contents of this device mean nothing once the process that used it has ended.\n";

/// What tells the mark from other data: it may say more in other versions.
const MARK_START: &[u8] = b"farheap: evicted pages\n";

/// Signatures with their offsets, as in the magic files of `file(1)` and `wipefs(8)`. Those of
/// volumes that carry a partition table as well come before that.
const KNOWN: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0, b"XFSB", "an xfs file system"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (512, b"LABELONE", "a physical volume of LVM"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (1024 + 56, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (1024, b"\x10\x20\xf5\xf2", "an f2fs file system"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member (md)"),
    (4096 - 10, b"SWAPSPACE2", "swap space"),
    (4096 - 10, b"SWAP-SPACE", "swap space"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (82, b"FAT32   ", "a FAT file system"),
    ((64 << 10) + 64, b"_BHRfS_M", "a btrfs file system"),
    (510, b"\x55\xaa", "a partition table or boot sector"),
];

/// What a device or file begins with.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, or nothing at all.
    Zeros,
    /// The mark of a device that farheap keeps evicted pages on: it may be overwritten.
    Farheap,
    /// Data, by a signature that is known.
    Known(&'static str),
    /// Other data.
    Unknown,
}

impl Contents {
    /// Judges by the first bytes; [`HEAD_LEN`] of them where there are so many.
    pub(crate) fn of_head(head: &[u8]) -> Contents {
        if head.iter().all(|byte| *byte == 0) {
            return Contents::Zeros;
        }
        if head.starts_with(MARK_START) {
            return Contents::Farheap;
        }
        let known = |(at, magic, _): &&(usize, &[u8], &str)| {
            head.get(*at..).is_some_and(|rest| rest.starts_with(magic))
        };
        KNOWN.iter().find(known).map_or(Contents::Unknown, |(_, _, name)| Contents::Known(name))
    }

    /// Whether nobody would miss it.
    #[must_use]
    pub fn is_free(self) -> bool {
        matches!(self, Contents::Zeros | Contents::Farheap)
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

    #[test]
    fn every_signature_is_recognized_at_its_place_only() {
        for (at, magic, name) in KNOWN {
            let mut head = vec![0; HEAD_LEN];
            head[*at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(Contents::of_head(&head), Contents::Known(name));
            head.rotate_right(1);
            assert_eq!(Contents::of_head(&head), Contents::Unknown, "{name}, moved");
        }
    }

    #[test]
    fn what_nobody_would_miss_is_told_from_data_however_short_it_is() {
        for len in [0, 1, 511, 4096, HEAD_LEN] {
            assert_eq!(Contents::of_head(&vec![0; len]), Contents::Zeros);
        }
        let marked = [MARK, &[0; 100], b"a page"].concat();
        assert_eq!(Contents::of_head(&marked), Contents::Farheap);
        assert_eq!(Contents::of_head(&MARK[..10]), Contents::Unknown);
        assert_eq!(Contents::of_head(b"root:x:0:0"), Contents::Unknown);
        assert!(!Contents::Unknown.is_free() && !Contents::Known("data").is_free());
    }

    #[test]
    fn the_mark_begins_with_what_it_is_known_by_and_fits_into_a_block() {
        assert!(MARK.starts_with(MARK_START) && MARK.len() < 512);
    }
}
