//! Units as types: bytes, pages, slots.
//!
//! A raw number says nothing about what it counts; these newtypes do. Conversions that can lose
//! or overflow are spelled out and checked.

use std::fmt;
use std::iter::Sum;

/// A number of bytes.
///
/// Parses what people write and prints binary units: `64MiB` and `64M` are 2^26 bytes, `64MB` is 64,000,000.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// let limit: ByteCount = "512MiB".parse()?;
/// assert_eq!(limit, ByteCount::mib(512));
/// assert_eq!(limit.to_string(), "512.0 MiB");
/// assert_eq!([limit, ByteCount::from(4096)].into_iter().sum::<ByteCount>().get(), (512 << 20) + 4096);
/// assert_eq!(limit.checked_sub(ByteCount::gib(1)), None);
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ByteCount(pub u64);

impl ByteCount {
    /// No bytes.
    pub const ZERO: ByteCount = ByteCount(0);

    /// `n` binary kilobytes (1,024 bytes each).
    ///
    /// # Panics
    /// When the product does not fit into 64 bits.
    #[must_use]
    pub const fn kib(n: u64) -> ByteCount {
        ByteCount(n.checked_mul(1 << 10).expect("kibibytes fit into u64"))
    }

    /// `n` binary megabytes (1,048,576 bytes each).
    ///
    /// # Panics
    /// When the product does not fit into 64 bits.
    #[must_use]
    pub const fn mib(n: u64) -> ByteCount {
        ByteCount(n.checked_mul(1 << 20).expect("mebibytes fit into u64"))
    }

    /// `n` binary gigabytes (2^30 bytes each).
    ///
    /// # Panics
    /// When the product does not fit into 64 bits.
    #[must_use]
    pub const fn gib(n: u64) -> ByteCount {
        ByteCount(n.checked_mul(1 << 30).expect("gibibytes fit into u64"))
    }

    /// The count as a plain number of bytes.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The count as `usize`; lossless on the 64-bit targets this crate supports.
    #[inline]
    #[must_use]
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// The sum, if it fits into 64 bits.
    pub fn checked_add(self, other: ByteCount) -> Option<ByteCount> {
        self.0.checked_add(other.0).map(ByteCount)
    }

    /// The difference, if it is not negative.
    pub fn checked_sub(self, other: ByteCount) -> Option<ByteCount> {
        self.0.checked_sub(other.0).map(ByteCount)
    }
}

impl From<u64> for ByteCount {
    fn from(bytes: u64) -> ByteCount {
        ByteCount(bytes)
    }
}

impl Sum for ByteCount {
    fn sum<I: Iterator<Item = ByteCount>>(counts: I) -> ByteCount {
        ByteCount(counts.map(ByteCount::get).sum())
    }
}

impl From<ByteCount> for u64 {
    fn from(bytes: ByteCount) -> u64 {
        bytes.0
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&bytesize::ByteSize(self.0).display().iec(), f)
    }
}

/// Defines a counting or naming newtype over `u64`.
macro_rules! unit {
    ($(#[$doc:meta])* $visible:vis $name:ident, $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visible struct $name($visible u64);

        impl $name {
            /// The plain number.
            #[inline]
            #[must_use]
            $visible const fn get(self) -> u64 {
                self.0
            }

            /// The plain number as an index; lossless on 64-bit targets.
            #[inline]
            #[must_use]
            $visible const fn as_usize(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}

unit!(
    /// A page of one region: its index from the region's first page.
    pub PageId,
    "page "
);
unit!(
    /// A number of pages of one region.
    pub PageCount,
    ""
);
unit!(
    /// A slot of one store: a page's place, its index from the device's first slot.
    pub(crate) SlotId,
    "slot "
);
unit!(
    /// A number of slots.
    pub(crate) SlotCount,
    ""
);
