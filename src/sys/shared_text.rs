//! A text that other processes of the same user can read: a file in memory, found in `/proc/PID/fd`.
//!
//! See `memfd_create(2)`. Opening a file by `/proc/PID/fd` needs the right to trace the process
//! (`proc_pid_fd(5)`, `ptrace(2)`): other users have none. Nothing is left behind when the process ends.

use super::fork::Private;
use super::{failed, refused};
use crate::base::error::Result;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::ffi::CStr;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The file.
#[derive(Debug)]
pub(crate) struct SharedText(Private<File>);

impl SharedText {
    /// Makes the file, empty; `/proc/PID/fd` shows it as `/memfd:NAME (deleted)`.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) for want of a descriptor.
    pub(crate) fn create(name: &CStr) -> Result<SharedText> {
        let file = memfd_create(name, MFdFlags::MFD_CLOEXEC).map_err(refused("memfd_create"))?;
        Ok(SharedText(Private::new(File::from(file))))
    }

    /// Replaces the text. A reader may see a part of the old one: it has to tell by what it reads.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) for want of memory.
    pub(crate) fn write(&self, text: &str) -> Result<()> {
        self.0.write_all_at(text.as_bytes(), 0).map_err(failed("pwrite(memfd)"))
    }
}
