//! Which pages of the process are there: `/proc/self/pagemap`.
//!
//! See `Documentation/admin-guide/mm/pagemap.rst`: one 64-bit entry per virtual page; bit 63
//! present, bit 62 swapped. Open to unprivileged processes (frame numbers are hidden).

use super::fork::Private;
use super::vm::KERNEL_PAGE;
use crate::base::error::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Entries read at once.
const ENTRIES: usize = 512;

/// The page map of this process.
#[derive(Debug)]
pub(crate) struct Pagemap(Private<File>);

impl Pagemap {
    /// Opens it; `None` where `/proc` is not mounted or hidden.
    ///
    /// # Errors
    /// [`Error::Os`] for want of a descriptor, which is no property of the machine.
    pub(crate) fn open() -> Result<Option<Pagemap>> {
        match File::open("/proc/self/pagemap") {
            Ok(file) => Ok(Some(Pagemap(Private::new(file)))),
            Err(error) => match error.raw_os_error() {
                Some(errno @ (libc::EMFILE | libc::ENFILE)) => {
                    Err(Error::Os { call: "open(/proc/self/pagemap)", errno })
                }
                _ => Ok(None),
            },
        }
    }

    /// Tells for each page from `start` on whether it has content, in memory or in swap.
    ///
    /// # Errors
    /// [`Error::Os`] when the map cannot be read.
    pub(crate) fn scan(&self, start: usize, there: &mut [bool]) -> Result<()> {
        let mut bytes = [0_u8; ENTRIES * 8];
        let mut offset = (start / KERNEL_PAGE * 8) as u64;
        for part in there.chunks_mut(ENTRIES) {
            let bytes = &mut bytes[..part.len() * 8];
            self.0.read_exact_at(bytes, offset).map_err(|error| Error::Os {
                call: "read(/proc/self/pagemap)",
                errno: error.raw_os_error().unwrap_or(libc::EIO),
            })?;
            for (there, entry) in part.iter_mut().zip(bytes.chunks_exact(8)) {
                let entry = u64::from_ne_bytes(entry.try_into().expect("chunks of 8 bytes"));
                *there = entry & (PRESENT | SWAPPED) != 0;
            }
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Bytes of the pages without content that the range begins with, as far as one look reaches
    /// (2 MiB); none when the map cannot be read. Allocates nothing.
    pub(crate) fn absent_from(&self, start: usize, len: usize) -> usize {
        let mut there = [true; ENTRIES];
        let there = &mut there[..(len / KERNEL_PAGE).min(ENTRIES)];
        if self.scan(start, there).is_err() {
            return 0;
        }
        there.iter().take_while(|there| !**there).count() * KERNEL_PAGE
    }
}
