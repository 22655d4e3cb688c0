//! How a store takes a device: the look at what it holds, the erasure of what is left of others,
//! and the signature on devices that hold evicted pages.
//!
//! A device that is named by mistake holds somebody's data. As swap space has to be made with
//! `mkswap(8)`, a device has to hold zeros, or with the signature nothing but evicted pages of an
//! earlier run, see [`Contents`].
//!
//! # Invariants
//! 1. After [`erase`](FoundFile::erase) the bytes that `Contents` looks at are zeros.
//! 2. Pages are kept out of the margins, so that these stay zeros: what is found there later is
//!    somebody else's, and no page is ever taken for the superblock of a file system.

use super::IO_ALIGN;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::sys::file::{self, Errno, FileKind};
use crate::sys::messages;
use crate::sys::probe::contents::{Contents, LOOKED_AT, OwnSignature, SPOTS, buffer, tail};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// Bytes that stay free at the start, and at the end of a block device: what partitions are aligned to.
const MARGIN: u64 = LOOKED_AT;
/// The same where the store has less than [`LARGE_MIN`] bytes: what partition tables, RAID members
/// and those file systems need that exist in this size.
const MARGIN_SMALL: u64 = 128 << 10;
/// Stores from this size on have the full margin.
const LARGE_MIN: ByteCount = ByteCount::mib(64);

/// Purpose of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Contents that are kept, of a file that may have to be created.
    Table,
    /// Contents that are kept, of a table that exists.
    #[cfg_attr(not(feature = "pool"), expect(dead_code, reason = "only the pool has tables"))]
    OldTable,
    /// Contents that are only read.
    Reading,
    /// Contents that begin anew; whether they may take the place of data.
    NewTable { overwrite: bool },
    /// Evicted pages; whether they may take the place of data.
    Scratch { overwrite: bool },
}

impl Use {
    /// The option that would allow overwriting data, where it is off.
    fn overwrite_option(self) -> Option<&'static str> {
        match self {
            Use::Scratch { overwrite: false } => Some("`overwrite:on`"),
            Use::NewTable { overwrite: false } => Some("`overwrite`"),
            _ => None,
        }
    }

    /// Checks that this may take the place of what `path` holds.
    ///
    /// # Errors
    /// The content, and how to allow overwriting it.
    pub(super) fn check(self, path: &Path, holds: &Contents) -> Result<()> {
        let Some(option) = self.overwrite_option().filter(|_| !holds.is_free()) else {
            return Ok(());
        };
        let what_to_do = format!("name another path, or set {option} if nobody needs that data");
        Err(refused(path, format!("holds {holds}, which would be lost; {what_to_do}")))
    }

    /// The end of a message about a path where nothing is, for a caller that has given no capacity.
    pub(super) fn describe_missing(self) -> &'static str {
        match self {
            Use::OldTable => "does not exist; `create` makes a new table",
            Use::Reading => "does not exist",
            _ => "does not exist; give a capacity to create a file",
        }
    }
}

pub(super) fn refused(path: &Path, reason: impl Into<String>) -> Error {
    Error::Device { path: path.to_path_buf(), reason: reason.into() }
}

/// Where a store for evicted pages of `capacity` bytes, margins included, lies in something of `len` bytes.
pub(super) fn pages_within(len: u64, has_tail: bool, capacity: ByteCount) -> Range<u64> {
    let margin = if capacity < LARGE_MIN { MARGIN_SMALL } else { MARGIN };
    let room = if has_tail { len - margin } else { len };
    margin..capacity.0.min(room - room % IO_ALIGN as u64)
}

/// A file or device that is about to be taken.
#[derive(Clone, Copy)]
pub(super) struct FoundFile<'a> {
    pub(super) path: &'a Path,
    pub(super) fd: BorrowedFd<'a>,
    pub(super) kind: FileKind,
    pub(super) len: u64,
}

impl FoundFile<'_> {
    /// Checks that it holds nothing that anybody would miss, if `what` takes its place.
    ///
    /// # Errors
    /// Its content, and how to allow overwriting it; or that it cannot be read.
    pub(super) fn check_free(self, what: Use) -> Result<()> {
        if what.overwrite_option().is_none() {
            Ok(())
        } else {
            what.check(self.path, &self.look()?)
        }
    }

    fn look(self) -> Result<Contents> {
        Contents::look(self.fd, self.kind, self.len)
            .map_err(|errno| refused(self.path, format!("cannot be read: {errno}")))
    }

    /// Makes a regular file readable by its owner only: a reader of it reads this process's memory. A process that opened
    /// it before keeps it open, as with swap files.
    ///
    /// # Errors
    /// That others keep access.
    fn keep_others_out(self) -> Result<()> {
        let info = || {
            file::info(self.fd)
                .map_err(|errno| refused(self.path, format!("cannot be looked at: {errno}")))
        };
        let (before, path) = (info()?, self.path.display());
        if before.owner != file::user() {
            let (owner, user) = (before.owner, file::user());
            return Err(refused(
                self.path,
                format!(
                    "belongs to user {owner}, who could read and change what user {user} keeps \
                     there: chown {user} {path}"
                ),
            ));
        }
        const OWNER: u32 = 0o700;
        if before.permissions & !OWNER == 0 {
            return Ok(());
        }
        let changed = file::set_permissions(self.fd, before.permissions & OWNER);
        let (mode, now) = (before.permissions, info()?.permissions);
        if now & !OWNER != 0 {
            let why = changed.err().map_or(String::new(), |errno| format!(": {errno}"));
            return Err(refused(
                self.path,
                format!("is open to other users (mode {mode:o}), which cannot be changed{why}"),
            ));
        }
        messages::warn(
            "a file was open to other users",
            format_args!(
                "{path} was open to other users (mode {mode:o}); now it is its owner's only (mode \
                 {now:o})"
            ),
        );
        Ok(())
    }

    /// Erases what is left of others: everything that is looked at, and where `holds_data` the
    /// places of further superblocks, from which programs restore the first ones.
    ///
    /// # Errors
    /// That it cannot be read or written.
    fn erase(self, holds_data: bool) -> Result<()> {
        let end = self.len - self.len % 512;
        self.zero(0..LOOKED_AT.min(end))?;
        if self.kind == FileKind::Block {
            self.zero(tail(end)..end)?;
        }
        for spot in SPOTS.iter().filter(|spot| holds_data && **spot + IO_ALIGN as u64 <= end) {
            self.zero(*spot..*spot + IO_ALIGN as u64)?;
        }
        Ok(())
    }

    /// Makes a range zeros; it begins with a block. Blocks that are zeros are not written, because
    /// in a sparse file they would take space.
    fn zero(self, range: Range<u64>) -> Result<()> {
        let _ours = keep_local();
        let unusable =
            |what: &str, errno: Errno| refused(self.path, format!("cannot be {what}: {errno}"));
        let len = (range.end - range.start) as usize;
        let mut buffer =
            buffer(len.next_multiple_of(IO_ALIGN)).map_err(|errno| unusable("read", errno))?;
        let read = file::read_at(self.fd, &mut buffer, range.start)
            .map_err(|errno| unusable("read", errno))?;
        for (index, block) in buffer[..read.min(len)].chunks_mut(IO_ALIGN).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                block.fill(0);
                let at = range.start + (index * IO_ALIGN) as u64;
                file::write_at(self.fd, block, at).map_err(|errno| unusable("written", errno))?;
            }
        }
        Ok(())
    }

    /// Prepares it for `what`; returns where the store lies in it. What it held is lost.
    ///
    /// # Errors
    /// That it cannot be read or written.
    pub(super) fn take(self, what: Use, capacity: ByteCount) -> Result<Range<u64>> {
        let (Use::Scratch { overwrite } | Use::NewTable { overwrite }) = what else {
            return Ok(0..capacity.0);
        };
        let holds_data = overwrite && !self.look()?.is_free();
        if self.kind == FileKind::Regular {
            self.keep_others_out()?;
        }
        self.erase(holds_data)?;
        if matches!(what, Use::NewTable { .. }) {
            return Ok(0..capacity.0);
        }
        // A regular file has nothing at its end that anybody looks for.
        let pages = pages_within(self.len, self.kind == FileKind::Block, capacity);
        let written = |errno| refused(self.path, format!("cannot be written: {errno}"));
        let mut block = buffer(IO_ALIGN).map_err(written)?;
        let text = OwnSignature { pages: pages.clone(), run: None }.text();
        block[..text.len()].copy_from_slice(text.as_bytes());
        file::write_at(self.fd, &mut block, 0).map_err(written)?;
        Ok(pages)
    }
}
