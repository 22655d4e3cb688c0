//! How much memory the process has in RAM: `/proc/self/statm`.
//!
//! See `proc_pid_statm(5)`: numbers of pages separated by blanks, the second is the resident set, the third
//! what of it belongs to files or is shared. The kernel counts per processor and adds up lazily: the number is wrong by up to 32 pages for each.

use super::failed;
use super::fork::Private;
use super::vm::KERNEL_PAGE;
use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of its text: seven numbers of at most 20 digits.
const TEXT_MAX: usize = 7 * 21;

/// The file, kept open: a look takes 2 us.
#[derive(Debug)]
pub(crate) struct Statm(Private<File>);

impl Statm {
    /// Opens it.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) where `/proc` is not mounted, or for want of a descriptor.
    pub(crate) fn open() -> Result<Statm> {
        File::open("/proc/self/statm")
            .map(|file| Statm(Private::new(file)))
            .map_err(failed("open(/proc/self/statm)"))
    }

    /// Bytes of this process that are in RAM and of neither files nor shared memory.
    pub(crate) fn anonymous(&self) -> Option<ByteCount> {
        self.look().map(|(resident, of_files)| ByteCount(resident.0.saturating_sub(of_files.0)))
    }

    /// Bytes of shared memory in RAM, of no file on a disk; none where the kernel does not say. Takes 20 us.
    #[cfg(feature = "heap")]
    pub(crate) fn shared() -> ByteCount {
        let mut text = [0; 4 << 10];
        let status = read_text(Path::new("/proc/self/status"), &mut text);
        status.and_then(|status| mem_info(status, "RssShmem:")).unwrap_or_default()
    }

    /// Bytes of this process that are in RAM, and the part of them that belongs to files or is shared. `None` when the
    /// kernel does not say.
    pub(crate) fn look(&self) -> Option<(ByteCount, ByteCount)> {
        // A process without its first thread, which has ended before others, has no memory by this file.
        let of_process = Statm::read(&self.0).filter(|(resident, _)| resident.0 > 0);
        of_process.or_else(|| Statm::read(&File::open("/proc/thread-self/statm").ok()?))
    }

    fn read(file: &File) -> Option<(ByteCount, ByteCount)> {
        let mut text = [0; TEXT_MAX];
        let len = file.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..len]).ok()?;
        let mut numbers = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
        let mut next = || Some(ByteCount(numbers.next()?.ok()? * KERNEL_PAGE as u64));
        Some((next()?, next()?))
    }
}

/// The text of a file, as far as there is room. Allocates nothing: what reads it again and again must not.
pub(crate) fn read_text<'a>(path: &Path, into: &'a mut [u8]) -> Option<&'a str> {
    let mut file = File::open(path).ok()?;
    let mut len = 0;
    while len < into.len() {
        match file.read(&mut into[len..]).ok()? {
            0 => break,
            read => len += read,
        }
    }
    std::str::from_utf8(&into[..len]).ok()
}

/// The bytes of a line such as `MemTotal:  16384 kB`, or `Node 0 MemTotal:  16384 kB`.
pub(crate) fn mem_info(meminfo: &str, name: &str) -> Option<ByteCount> {
    let (_, line) = meminfo.lines().find_map(|line| line.split_once(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteCount(kib.checked_mul(1 << 10)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_touched_is_counted() {
        let statm = Statm::open().expect("/proc is mounted");
        let anonymous = || statm.anonymous().expect("a number").0;
        // Other tests free memory meanwhile: not in all of these looks.
        let seen = (0..100).any(|_| {
            let before = anonymous();
            let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
            let after = anonymous();
            drop(touched);
            (before + (60 << 20)..before + (1 << 30)).contains(&after)
        });
        assert!(seen);
    }
}
