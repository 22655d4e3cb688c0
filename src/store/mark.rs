//! The mark on devices that hold evicted pages, and the look at what a device holds before.
//!
//! A device that is named by mistake holds somebody's data. As swap space has to be made with
//! `mkswap(8)`, a device for evicted pages has to begin with zeros, or with the mark that was left
//! when it was used first.

use super::IO_ALIGN;
use super::block::refused;
use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::sys::file::{self, Errno};
use crate::sys::probe::contents::{Contents, HEAD_LEN, MARK};
use std::os::fd::BorrowedFd;
use std::path::Path;

/// Where a store begins that is large enough not to miss it: what partitions are aligned to.
const BASE: u64 = 1 << 20;
/// Stores from this size on begin at [`BASE`].
const LARGE_MIN: ByteCount = ByteCount::mib(64);

/// A buffer that direct I/O takes.
#[repr(C, align(4096))]
struct Aligned<const LEN: usize>([u8; LEN]);

/// Checks that a device holds nothing that anybody would miss.
///
/// # Errors
/// What it holds, and how to say that it can go; or that it cannot be read.
pub(super) fn check_free(path: &Path, fd: BorrowedFd<'_>) -> Result<()> {
    let mut head = Box::new(Aligned([0; HEAD_LEN]));
    let unreadable = |errno: Errno| refused(path, format!("cannot be read: {errno}"));
    let len = file::read_head(fd, &mut head.0).map_err(unreadable)?;
    let holds = Contents::of_head(&head.0[..len]);
    if holds.is_free() {
        return Ok(());
    }
    let what_to_do = "name another device, or set `overwrite:on` if nobody needs that";
    Err(refused(path, format!("holds {holds}, which would be lost; {what_to_do}")))
}

/// Leaves the mark; returns where the store of `capacity` bytes begins behind it.
///
/// # Errors
/// That it cannot be written.
pub(super) fn leave(path: &Path, fd: BorrowedFd<'_>, capacity: ByteCount) -> Result<u64> {
    let mut block = Aligned([0; IO_ALIGN]);
    block.0[..MARK.len()].copy_from_slice(MARK);
    file::write_head(fd, &mut block.0)
        .map_err(|errno| refused(path, format!("cannot be written: {errno}")))?;
    Ok(if capacity < LARGE_MIN { IO_ALIGN as u64 } else { BASE })
}
