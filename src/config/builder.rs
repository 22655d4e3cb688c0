//! [`Builder`]: collects options, checks them and makes a [`Config`].

use super::text::{self, Key};
use super::{
    CAPACITY_MAX, Config, DEADLINE_MAX, DEADLINE_MIN, ENV, HANDLERS_MAX, Install, Io, LIMIT_MIN,
    LIMIT_PAGES_MIN, Limit, Mode, PAGE_MAX, PAGE_MIN, POLL_MAX, SPAN_MAX, UserMode, Wipe, invalid,
};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::probe;
use std::path::PathBuf;
use std::time::Duration;

/// Collects options for a [`Config`]. Nothing is checked before [`build`](Builder::build).
#[must_use = "a builder does nothing until `build` is called"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Builder {
    pub(super) limit: Limit,
    pub(super) device: Option<PathBuf>,
    pub(super) dir: Option<PathBuf>,
    pub(super) overwrite: bool,
    pub(super) capacity: Option<ByteCount>,
    pub(super) reserve: bool,
    pub(super) page: ByteCount,
    pub(super) handlers: Option<u16>,
    pub(super) threshold: Option<ByteCount>,
    pub(super) span: ByteCount,
    pub(super) io: Io,
    pub(super) install: Install,
    pub(super) checksum: bool,
    pub(super) deadline: Duration,
    pub(super) poll: Duration,
    pub(super) user_mode: UserMode,
    pub(super) readahead: bool,
    pub(super) mode: Mode,
    pub(super) dump: bool,
    pub(super) encrypt: bool,
    pub(super) wipe: Wipe,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            limit: Limit::Percent(50),
            device: None,
            dir: None,
            overwrite: false,
            capacity: None,
            reserve: false,
            page: ByteCount::kib(64),
            handlers: None,
            threshold: Some(ByteCount::kib(64)),
            span: ByteCount::gib(1 << 10),
            io: Io::Auto,
            install: Install::Auto,
            checksum: true,
            deadline: Duration::from_secs(30),
            poll: Duration::from_micros(200),
            user_mode: UserMode::Auto,
            readahead: true,
            mode: Mode::Handler,
            dump: false,
            encrypt: false,
            wipe: Wipe::Off,
        }
    }
}

impl Builder {
    /// Sets the most far memory that may be resident, in bytes. At least the larger of
    /// [`LIMIT_MIN`] and [`LIMIT_PAGES_MIN`] pages.
    ///
    /// Default: 50 % of the memory available. Set it to what this process may have when others
    /// share the machine. Of this and [`limit_percent`](Builder::limit_percent), the last call
    /// counts.
    pub fn limit(mut self, bytes: ByteCount) -> Builder {
        self.limit = Limit::Bytes(bytes);
        self
    }

    /// Sets the limit to 1 to 100 percent of the memory available to the process: the smaller of
    /// its control groups' limits and the machine's memory. The text form is `limit:70%`.
    ///
    /// Default: 50. Raise it when far memory is nearly all that the process uses.
    pub fn limit_percent(mut self, percent: u8) -> Builder {
        self.limit = Limit::Percent(percent);
        self
    }

    /// Sets the block device or regular file that keeps evicted pages. **Its contents are
    /// overwritten**, so it must begin with zeros or with what an earlier run left, unless
    /// [`overwrite`](Builder::overwrite) is set.
    ///
    /// Default: an unlinked temporary file in [`dir`](Builder::dir). Name a raw device when there
    /// is one: it spares the file system's work and has a fixed size.
    pub fn device(mut self, path: impl Into<PathBuf>) -> Builder {
        self.device = Some(path.into());
        self
    }

    /// Sets whether a device that holds data is overwritten; what looks like data is a device that
    /// begins neither with zeros nor with the mark of an earlier run.
    ///
    /// Default: `false`, such a device is refused with what it holds. Set it for a device whose
    /// contents nobody needs, instead of erasing it by hand.
    pub fn overwrite(mut self, on: bool) -> Builder {
        self.overwrite = on;
        self
    }

    /// Sets the directory of the temporary file. Conflicts with [`device`](Builder::device).
    ///
    /// Default: [`temporary_dir`](crate::probe::temporary_dir), which is `$TMPDIR`, `/tmp`, or
    /// `/var/tmp` where `/tmp` is in memory. Set it when that one is small. A directory in memory
    /// (tmpfs) is accepted with a warning: evicting to it frees no memory.
    pub fn dir(mut self, path: impl Into<PathBuf>) -> Builder {
        self.dir = Some(path.into());
        self
    }

    /// Sets how many bytes of the device may be used.
    ///
    /// Default: all of a device or file; a temporary file grows as far as its file system lets
    /// it. Set it to leave room for others.
    pub fn capacity(mut self, bytes: impl Into<Option<ByteCount>>) -> Builder {
        self.capacity = bytes.into();
        self
    }

    /// Sets whether the space of a file is taken from its file system at start-up: of the
    /// temporary file, which needs a [`capacity`](Builder::capacity) then, or of the regular file
    /// named as [`device`](Builder::device).
    ///
    /// Default: off, the file takes space as pages are written and gives it back as they are
    /// freed. When others fill the file system, far allocations are refused, but memory that was
    /// granted before may find no room either: touching it is `SIGBUS` then. Set it where that
    /// must not happen, for the price that nobody else can use the space meanwhile.
    pub fn reserve(mut self, on: bool) -> Builder {
        self.reserve = on;
        self
    }

    /// Sets the page size in bytes, a power of two from [`PAGE_MIN`] to [`PAGE_MAX`].
    ///
    /// Default: 64 KiB. Larger for scans, smaller (4 KiB) for pointer-rich structures that touch
    /// a few bytes per page.
    pub fn page(mut self, bytes: ByteCount) -> Builder {
        self.page = bytes;
        self
    }

    /// Sets the number of handler threads, 1 to [`HANDLERS_MAX`].
    ///
    /// Default: `None`, chosen by the runtime from the number of processors. Set it when faults
    /// wait for a handler while processors idle, or to bound the threads.
    pub fn handlers(mut self, threads: impl Into<Option<u16>>) -> Builder {
        self.handlers = threads.into();
        self
    }

    /// Sets the size in bytes from which the global allocator places allocations in far memory;
    /// `None` (`off` in text): never, only explicit requests and thread scopes do.
    ///
    /// Default: 64 KiB. Lower it when much of the data is small objects; `off` when the program
    /// chooses itself what goes far.
    pub fn threshold(mut self, bytes: impl Into<Option<ByteCount>>) -> Builder {
        self.threshold = bytes.into();
        self
    }

    /// Sets how much address space is reserved for far memory, in bytes, up to [`SPAN_MAX`]. It
    /// costs no memory.
    ///
    /// Default: 1 TiB. Lower it where the address space is limited (`ulimit -v`), raise it when
    /// more data than that is alive at once.
    pub fn span(mut self, bytes: ByteCount) -> Builder {
        self.span = bytes;
        self
    }

    /// Sets how the store is read and written.
    ///
    /// Default: [`Io::Auto`]. Change it to force a path while testing or measuring.
    pub fn io(mut self, io: Io) -> Builder {
        self.io = io;
        self
    }

    /// Sets which operation installs and evicts pages.
    ///
    /// Default: [`Install::Auto`]. Change it to force a path while testing or measuring: `copy` is
    /// what kernels before 6.8 have, `move` is dearer for pages below 2 MiB.
    pub fn install(mut self, install: Install) -> Builder {
        self.install = install;
        self
    }

    /// Sets whether every page read from the store is checked against its checksum.
    ///
    /// Default: on. Off only where the device checks end to end and every nanosecond counts.
    pub fn checksum(mut self, on: bool) -> Builder {
        self.checksum = on;
        self
    }

    /// Sets how long one device request may take, from [`DEADLINE_MIN`] to [`DEADLINE_MAX`],
    /// before it counts as failed, and for how long a read that fails is repeated before its page
    /// counts as lost. Time in which the process is stopped does not count.
    ///
    /// Default: 30 s. Raise it for network devices that recover slowly, lower it where failing
    /// early is better than waiting.
    pub fn deadline(mut self, deadline: Duration) -> Builder {
        self.deadline = deadline;
        self
    }

    /// Sets how long a thread that serves faults looks for the device's answer before it sleeps,
    /// at most [`POLL_MAX`]; zero: never. It looks only while no other thread wants its processor
    /// and while the device usually answers within that time.
    ///
    /// Default: 200 us, with which a fault is answered a quarter sooner. Zero where processors
    /// that do not halt cost money or power.
    pub fn poll(mut self, longest: Duration) -> Builder {
        self.poll = longest;
        self
    }

    /// Sets what happens where only faults from user mode are permitted, as they are to
    /// unprivileged programs on most distributions. There a system call fails with `EFAULT` when
    /// it reads or writes far memory that is not resident.
    ///
    /// Default: [`UserMode::Auto`], no allocation goes far by its size there, so that a program
    /// works as it does on the system's allocator. [`UserMode::Far`] when the program's large
    /// allocations never reach a system call; [`UserMode::RequireKernel`] when a program without
    /// far memory is worse than one that does not start.
    pub fn user_mode(mut self, user_mode: UserMode) -> Builder {
        self.user_mode = user_mode;
        self
    }

    /// Sets whether sequential and strided faults read the pages to come.
    ///
    /// Default: on. Off for purely random access, or to count faults exactly.
    pub fn readahead(mut self, on: bool) -> Builder {
        self.readahead = on;
        self
    }

    /// Sets who resolves a fault.
    ///
    /// Default: [`Mode::Handler`]. [`Mode::InThread`] has the lowest latency where far pointers
    /// never reach a system call.
    pub fn mode(mut self, mode: Mode) -> Builder {
        self.mode = mode;
        self
    }

    /// Sets whether core dumps contain the far memory that is resident. What is on the device is
    /// never in a dump.
    ///
    /// Default: off. Set it to look at far data in a debugger after a crash; dumps grow by up to
    /// the limit.
    pub fn dump(mut self, on: bool) -> Builder {
        self.dump = on;
        self
    }

    /// Sets whether pages are encrypted (AES-256-GCM) before they reach the device. The key is
    /// made at start-up and lives only in this process; a page that was changed or exchanged on
    /// the device counts as lost, like one whose checksum is wrong.
    ///
    /// Default: off. Set it when others can read the device, now or later: it costs a core about
    /// 7 us for 64 KiB each way, and 24 bytes of memory for each page on the device.
    pub fn encrypt(mut self, on: bool) -> Builder {
        self.encrypt = on;
        self
    }

    /// Sets what happens at an orderly shutdown to the pages on the device.
    ///
    /// Default: [`Wipe::Off`]. Change it when a device or a named file is used by others
    /// afterwards. A process that is killed wipes nothing: [`encrypt`](Builder::encrypt) then.
    pub fn wipe(mut self, how: Wipe) -> Builder {
        self.wipe = how;
        self
    }

    /// Overlays the entries of a text on the options: each key it names replaces what was set
    /// before, and a `device` replaces a `dir` set before, and the other way round.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key, when it is unknown, malformed or given twice.
    pub fn parse(mut self, text: &str) -> Result<Builder> {
        text::overlay(&mut self, text)?;
        Ok(self)
    }

    /// Overlays the environment variable [`ENV`], if it is present, as
    /// [`parse`](Builder::parse) does: who runs the program has the last word.
    ///
    /// # Errors
    /// As [`parse`](Builder::parse); also when the variable is not UTF-8.
    pub fn from_env(self) -> Result<Builder> {
        match std::env::var(ENV) {
            Ok(text) => self.parse(&text),
            Err(std::env::VarError::NotPresent) => Ok(self),
            Err(std::env::VarError::NotUnicode(_)) => Err(invalid(ENV, "is not UTF-8")),
        }
    }

    /// Checks the options and resolves a percentage on this machine.
    ///
    /// # Errors
    /// [`Error::Config`] names the first option whose value is out of range or conflicts with
    /// another; [`Error::LimitTooSmall`] when the limit cannot hold [`LIMIT_PAGES_MIN`] pages or
    /// is below [`LIMIT_MIN`].
    pub fn build(self) -> Result<Config> {
        self.build_on(|| probe::Memory::detect().available())
    }

    /// [`build`](Builder::build) on a machine with as much memory as `available` says.
    fn build_on(self, available: impl FnOnce() -> Option<ByteCount>) -> Result<Config> {
        self.check_sizes()?;
        self.check_paths()?;
        if self.handlers.is_some_and(|threads| !(1..=HANDLERS_MAX).contains(&threads)) {
            return Err(invalid(Key::Handlers, format!("must be from 1 to {HANDLERS_MAX}")));
        }
        if !(DEADLINE_MIN..=DEADLINE_MAX).contains(&self.deadline) {
            return Err(invalid(Key::Deadline, "must be from 1ms to 1day"));
        }
        if self.poll > POLL_MAX {
            return Err(invalid(Key::Poll, "must be `off` or at most 500us"));
        }
        if self.user_mode == UserMode::RequireKernel && self.mode == Mode::InThread {
            let reason = "`require_kernel` conflicts with `mode:in_thread`, which serves no faults \
                          of kernel mode";
            return Err(invalid(Key::UserMode, reason));
        }
        let limit = self.resolve_limit(available)?;
        let minimum = LIMIT_MIN.max(ByteCount(LIMIT_PAGES_MIN * self.page.get()));
        if limit < minimum {
            return Err(Error::LimitTooSmall { limit, minimum });
        }
        if self.span < limit {
            let reason = format!("{} is less than the limit of {limit}", self.span);
            return Err(invalid(Key::Span, reason));
        }
        Ok(Config { options: self, limit })
    }

    fn check_sizes(&self) -> Result<()> {
        if !self.page.is_power_of_two() || !(PAGE_MIN..=PAGE_MAX).contains(&self.page) {
            let reason = format!("{} is not a power of two from 4KiB to 2MiB", self.page);
            return Err(invalid(Key::Page, reason));
        }
        if self.span > SPAN_MAX {
            return Err(invalid(Key::Span, format!("must be at most {SPAN_MAX}")));
        }
        if self.span < self.page {
            return Err(invalid(Key::Span, "must be at least one page"));
        }
        if let Some(capacity) = self.capacity {
            if capacity > CAPACITY_MAX {
                return Err(invalid(Key::Capacity, format!("must be at most {CAPACITY_MAX}")));
            }
            if capacity < self.page {
                return Err(invalid(Key::Capacity, "must be at least one page"));
            }
        }
        if self.threshold == Some(ByteCount::ZERO) {
            return Err(invalid(
                Key::Threshold,
                "must not be zero; `off` sends no allocation far, 1 sends all",
            ));
        }
        Ok(())
    }

    fn check_paths(&self) -> Result<()> {
        for (key, path) in [(Key::Device, &self.device), (Key::Dir, &self.dir)] {
            let Some(path) = path else { continue };
            if path.as_os_str().is_empty() {
                return Err(invalid(key, "the path is empty"));
            }
            if path.as_os_str().as_encoded_bytes().contains(&0) {
                return Err(invalid(key, "the path contains a NUL byte"));
            }
        }
        if self.reserve && self.device.is_none() && self.capacity.is_none() {
            return Err(invalid(
                Key::Reserve,
                "needs `capacity`: without it the temporary file may take all of its file system",
            ));
        }
        if self.device.is_some() && self.dir.is_some() {
            return Err(invalid(
                Key::Dir,
                "conflicts with `device`: a temporary file or a device, not both",
            ));
        }
        Ok(())
    }

    fn resolve_limit(&self, available: impl FnOnce() -> Option<ByteCount>) -> Result<ByteCount> {
        match self.limit {
            Limit::Bytes(ByteCount::ZERO) => Err(invalid(Key::Limit, "must not be zero")),
            Limit::Bytes(bytes) => Ok(bytes),
            Limit::Percent(percent) if !(1..=100).contains(&percent) => {
                Err(invalid(Key::Limit, format!("{percent}% is not from 1% to 100%")))
            }
            Limit::Percent(percent) => {
                let available = available().ok_or_else(|| {
                    let reason = "/proc/meminfo does not say how much memory there is; give bytes";
                    invalid(Key::Limit, reason)
                })?;
                // Divided first, so that nothing overflows; loses less than 100 bytes.
                Ok(ByteCount(available.get() / 100 * u64::from(percent)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_taken_of_the_memory_available() {
        let config = Config::builder()
            .limit_percent(70)
            .build_on(|| Some(ByteCount::gib(10)))
            .expect("7 GiB is a fine limit");
        assert_eq!(config.limit(), ByteCount((10 << 30) / 100 * 70));
        assert_eq!(config.limit_percent(), Some(70));
    }

    #[test]
    fn the_default_limit_is_half_of_the_memory_available() {
        let config = Config::builder().build_on(|| Some(ByteCount::gib(4))).expect("defaults");
        assert_eq!(config.limit(), ByteCount((4 << 30) / 100 * 50));
    }

    #[test]
    fn a_percentage_of_too_little_memory_is_a_limit_too_small() {
        let error = Config::builder().build_on(|| Some(ByteCount::mib(10))).expect_err("5 MiB");
        assert!(matches!(error, Error::LimitTooSmall { minimum: LIMIT_MIN, .. }), "{error}");
    }

    #[test]
    fn a_percentage_of_unknown_memory_is_an_error_and_bytes_are_not() {
        let error = Config::builder().build_on(|| None).expect_err("unknown memory");
        assert!(error.to_string().contains("give bytes"), "{error}");
        let config = Config::builder().limit(ByteCount::mib(64)).build_on(|| None);
        assert_eq!(config.expect("bytes need no machine").limit(), ByteCount::mib(64));
    }
}
