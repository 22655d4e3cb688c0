//! Which pages of the process are there: `/proc/self/pagemap`.
//!
//! See `Documentation/admin-guide/mm/pagemap.rst`: one 64-bit entry per virtual page; bit 63
//! present, bit 62 swapped, bit 56 mapped by this process only. Open to unprivileged processes (frame
//! numbers are hidden).

#![expect(unsafe_code, reason = "calls ioctl on the page map")]

use super::fork::Private;
use super::vm::KERNEL_PAGE;
use super::{failed, refused};
use crate::base::error::Result;
use linux_raw_sys::general as kernel;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const EXCLUSIVE: u64 = 1 << 56;
/// Entries read at once.
const ENTRIES: usize = 512;

nix::ioctl_readwrite!(scan_call, b'f', 16, kernel::pm_scan_arg);

/// Why there is none, for errors.
pub(crate) const NO_PAGE_MAP: &str = "/proc/self/pagemap cannot be read: the process is not dumpable (PR_SET_DUMPABLE), or /proc is hidden";

/// The page map of this process.
#[derive(Debug)]
pub struct Pagemap(Private<File>);

impl Pagemap {
    /// Opens it; `None` where `/proc` is not mounted or hidden.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) for want of a descriptor, which is no property of the machine.
    pub fn open() -> Result<Option<Pagemap>> {
        // That of the process has no map once its first thread has ended before others. The thread's is the second
        // choice: a name looked up below a thread is thrown away when that ends, and a parent that waits for the
        // process meanwhile spins (Linux 6.18, `shrink_dcache_parent`): on a busy machine for seconds.
        for path in ["/proc/self/pagemap", "/proc/thread-self/pagemap"] {
            match File::open(path) {
                Ok(file) if file.read_at(&mut [0; 8], 0).is_ok_and(|len| len > 0) => {
                    return Ok(Some(Pagemap(Private::new(file))));
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    return Err(failed("open(/proc/self/pagemap)")(error));
                }
                _ => (),
            }
        }
        Ok(None)
    }

    /// Tells for each page from `start` on whether it has content, in memory or in swap.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the map cannot be read.
    pub(crate) fn scan(&self, start: usize, there: &mut [bool]) -> Result<()> {
        self.look(start, there, |entry| entry & (PRESENT | SWAPPED) != 0)
    }

    /// Tells for each page from `start` on whether it is in memory, and no other process maps it.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the map cannot be read.
    pub(crate) fn owned(&self, start: usize, owned: &mut [bool]) -> Result<()> {
        self.look(start, owned, |entry| entry & PRESENT != 0 && entry & EXCLUSIVE != 0)
    }

    /// The first part of `[start, end)` that is in memory, if there is one; costs little however much is
    /// not. See `PAGEMAP_SCAN` (Linux 6.7).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) where the kernel does not know the call.
    pub(crate) fn next_present(&self, start: usize, end: usize) -> Result<Option<(usize, usize)>> {
        self.next(start, end, kernel::PAGE_IS_PRESENT)
    }

    /// The same for what is in memory and a file's, or shared: private pages that were written are not.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) where the kernel does not know the call.
    #[cfg(feature = "heap")]
    pub fn next_of_file(&self, start: usize, end: usize) -> Result<Option<(usize, usize)>> {
        self.next(start, end, kernel::PAGE_IS_PRESENT | kernel::PAGE_IS_FILE)
    }

    /// The first part of the range whose pages are all of these categories.
    fn next(&self, start: usize, end: usize, are: u32) -> Result<Option<(usize, usize)>> {
        let mut found = kernel::page_region { start: 0, end: 0, categories: 0 };
        let mut args = kernel::pm_scan_arg {
            size: size_of::<kernel::pm_scan_arg>() as u64,
            flags: 0,
            start: start as u64,
            end: end as u64,
            walk_end: 0,
            vec: (&raw mut found).addr() as u64,
            vec_len: 1,
            max_pages: 0,
            category_inverted: 0,
            category_mask: u64::from(are),
            category_anyof_mask: 0,
            return_mask: u64::from(are),
        };
        // SAFETY: the argument is as the kernel defines it, with room for one range.
        let count = unsafe { scan_call(self.0.as_raw_fd(), &raw mut args) };
        let count = count.map_err(refused("PAGEMAP_SCAN"))?;
        Ok((count > 0).then_some((found.start as usize, found.end as usize)))
    }

    fn look(&self, start: usize, there: &mut [bool], says: impl Fn(u64) -> bool) -> Result<()> {
        let mut bytes = [0_u8; ENTRIES * 8];
        let mut offset = (start / KERNEL_PAGE * 8) as u64;
        for part in there.chunks_mut(ENTRIES) {
            let bytes = &mut bytes[..part.len() * 8];
            self.0.read_exact_at(bytes, offset).map_err(failed("read(/proc/self/pagemap)"))?;
            for (there, entry) in part.iter_mut().zip(bytes.chunks_exact(8)) {
                let entry = u64::from_ne_bytes(entry.try_into().expect("chunks of 8 bytes"));
                *there = says(entry);
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
