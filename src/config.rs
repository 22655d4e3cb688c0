//! Configuration: one builder and one environment variable with the same keys.
//!
//! [`Config`] is a checked set of options, made by a [`Builder`], by [`Config::parse`] from text
//! such as `limit:512MiB,device:/dev/nvme1n1`, or by [`Config::from_env`] from the variable
//! [`ENV`]. Layer 9; uses only `base` and, for the size of the machine's memory, `sys`.
//! Parsing runs at start-up on the ordinary heap.
//!
//! # Keys
//! | key | value | default |
//! |---|---|---|
//! | `limit` | size, or percentage of the memory available to the process | `50%` |
//! | `device` | path of a block device or regular file | an unlinked temporary file |
//! | `dir` | directory of that temporary file | the system's |
//! | `overwrite` | `on`, `off` | `off` |
//! | `capacity` | size | all of the device |
//! | `reserve` | `on`, `off` | `off` |
//! | `page` | size, power of two from 4KiB to 2MiB | `64KiB` |
//! | `handlers` | `auto` or 1 to 64 threads | `auto` |
//! | `threshold` | size or `off` | `64KiB` |
//! | `span` | size | `1TiB` |
//! | `io` | `auto`, `uring`, `sync` | `auto` |
//! | `install` | `auto`, `copy`, `move` | `auto` |
//! | `checksum` | `on`, `off` | `on` |
//! | `deadline` | duration, 1ms to 1day | `30s` |
//! | `poll` | `off` or duration up to 500us | `200us` |
//! | `user_mode` | `auto`, `far`, `require_kernel` | `auto` |
//! | `readahead` | `on`, `off` | `on` |
//! | `mode` | `handler`, `in_thread` | `handler` |
//! | `dump` | `on`, `off` | `off` |
//! | `encrypt` | `on`, `off` | `off` |
//! | `wipe` | `off`, `discard`, `zero` | `off` |
//!
//! Each key is explained at the [`Builder`]'s method of the same name.
//!
//! # Text form
//! `key:value` entries separated by commas; spaces around keys, values and entries are ignored. A
//! key ends at its first colon, so values may contain colons. A value that contains a comma, or
//! that begins with a double quote, is written in double quotes, in which `""` stands for one:
//! `device:"/mnt/a,b"`. Sizes take a unit: `KiB`, `MiB`, `GiB`, `TiB` (binary), `kB`, `MB`, `GB`,
//! `TB` (decimal); durations are as in `30s`, `500ms`, `1m30s`. A key may appear only once.
//!
//! # Invariants
//! 1. A [`Config`] that exists has passed every check of [`Builder::build`].
//! 2. Parsing what a [`Config`] prints gives an equal [`Config`], if its paths are UTF-8.

mod builder;
mod text;

pub use crate::paging::region::{Install, Mode, PAGE_MAX, PAGE_MIN};
pub use crate::store::Wipe;
pub use builder::Builder;

use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use std::path::Path;
use std::time::Duration;

/// The environment variable that [`Config::from_env`] reads.
pub const ENV: &str = "FARHEAP_CONF";

/// Smallest limit, whatever the page size.
pub const LIMIT_MIN: ByteCount = ByteCount::mib(8);
/// Fewest pages that fit under a limit: one batch of evictions.
pub const LIMIT_PAGES_MIN: u64 = 64;
/// Most handler threads.
pub const HANDLERS_MAX: u16 = 64;
/// Largest reservation: half of the 47-bit address space, so that the rest stays usable.
pub const SPAN_MAX: ByteCount = ByteCount::gib(64 << 10);
/// Largest device size: the kernel's file offsets are signed.
pub const CAPACITY_MAX: ByteCount = ByteCount(i64::MAX as u64);
/// Shortest deadline of a device request.
pub const DEADLINE_MIN: Duration = Duration::from_millis(1);
/// Longest deadline of a device request.
pub const DEADLINE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Longest polling: half of the time after which a handler that does nothing but run when its
/// processor is idle counts as starved.
pub const POLL_MAX: Duration = Duration::from_micros(500);

/// How the store is read and written.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// io_uring where the kernel allows it, else system calls.
    #[default]
    Auto,
    /// io_uring, or start-up fails.
    Uring,
    /// `preadv` and `pwritev`, one request at a time per thread.
    Sync,
}

/// What happens where only faults from user mode are permitted: far memory works there, except that
/// a system call fails with `EFAULT` when it reads or writes far memory that is not resident.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UserMode {
    /// The heap starts, and no allocation of the global allocator goes far by its size, because any
    /// of them may be the buffer of a system call. Only explicit requests go far: the handle
    /// [`Far`](crate::Far), a [`scope`](crate::scope()), temporary memory. Start-up says so on
    /// standard error. With [`Mode::InThread`] sizes decide all the same, because that mode is
    /// chosen by programs whose far memory never reaches a system call.
    #[default]
    Auto,
    /// The heap starts, and sizes decide as they do elsewhere.
    Far,
    /// Start-up fails.
    RequireKernel,
}

/// The limit as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Bytes(ByteCount),
    Percent(u8),
}

/// A checked set of options for a far heap.
///
/// # Examples
/// ```
/// use farheap::{ByteCount, Config};
/// let config = Config::builder().limit(ByteCount::mib(512)).page(ByteCount::kib(256)).build()?;
/// assert_eq!(config.limit(), ByteCount::mib(512));
/// assert_eq!(Config::parse("limit:512MiB,page:256KiB")?, config);
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    options: Builder,
    /// `options.limit` in bytes on this machine.
    limit: ByteCount,
}

impl Config {
    /// Returns a builder that holds the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Reads the environment variable [`ENV`]; the defaults, when it is absent.
    ///
    /// # Errors
    /// As [`Builder::from_env`] and [`Builder::build`].
    pub fn from_env() -> Result<Config> {
        Config::builder().from_env()?.build()
    }

    /// Reads the text form; keys that are absent have their defaults.
    ///
    /// # Errors
    /// As [`Builder::parse`] and [`Builder::build`].
    pub fn parse(text: &str) -> Result<Config> {
        Config::builder().parse(text)?.build()
    }

    /// The most far memory that may be resident, in bytes; a percentage was resolved when the
    /// configuration was built.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        self.limit
    }

    /// The percentage that [`limit`](Config::limit) was asked for as, if it was one.
    #[must_use]
    pub fn limit_percent(&self) -> Option<u8> {
        match self.options.limit {
            Limit::Percent(percent) => Some(percent),
            Limit::Bytes(_) => None,
        }
    }

    /// The block device or file given; `None` for an unlinked temporary file.
    #[must_use]
    pub fn device(&self) -> Option<&Path> {
        self.options.device.as_deref()
    }

    /// The directory of the temporary file; `None` for the default
    /// ([`temporary_dir`](crate::probe::temporary_dir)).
    #[must_use]
    pub fn dir(&self) -> Option<&Path> {
        self.options.dir.as_deref()
    }

    /// Bytes of the device to use; `None` for all of it.
    #[must_use]
    pub fn capacity(&self) -> Option<ByteCount> {
        self.options.capacity
    }

    /// Whether the space of a file is taken at start-up.
    #[must_use]
    pub fn reserve(&self) -> bool {
        self.options.reserve
    }

    /// The page size.
    #[must_use]
    pub fn page(&self) -> ByteCount {
        self.options.page
    }

    /// Handler threads, 1 to [`HANDLERS_MAX`]; `None` leaves the choice to the runtime.
    #[must_use]
    pub fn handlers(&self) -> Option<u16> {
        self.options.handlers
    }

    /// The size from which the global allocator places allocations far; `None` for never.
    #[must_use]
    pub fn threshold(&self) -> Option<ByteCount> {
        self.options.threshold
    }

    /// Address space to reserve for far memory.
    #[must_use]
    pub fn span(&self) -> ByteCount {
        self.options.span
    }

    /// How the store is read and written.
    #[must_use]
    pub fn io(&self) -> Io {
        self.options.io
    }

    /// Which operation installs and evicts pages.
    #[must_use]
    pub fn install(&self) -> Install {
        self.options.install
    }

    /// Whether pages read from the store are checked against their checksum.
    #[must_use]
    pub fn checksum(&self) -> bool {
        self.options.checksum
    }

    /// How long one device request may take.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.options.deadline
    }

    /// Whether a device that holds data is overwritten.
    #[must_use]
    pub fn overwrite(&self) -> bool {
        self.options.overwrite
    }

    /// How long a handler looks for the device's answer before it sleeps; zero: never.
    #[must_use]
    pub fn poll(&self) -> Duration {
        self.options.poll
    }

    /// What happens where only faults from user mode are permitted.
    #[must_use]
    pub fn user_mode(&self) -> UserMode {
        self.options.user_mode
    }

    /// Whether sequential and strided faults read ahead.
    #[must_use]
    pub fn readahead(&self) -> bool {
        self.options.readahead
    }

    /// Who resolves a fault.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.options.mode
    }

    /// Whether core dumps contain resident far memory.
    #[must_use]
    pub fn dump(&self) -> bool {
        self.options.dump
    }

    /// Whether pages are encrypted before they reach the device.
    #[must_use]
    pub fn encrypt(&self) -> bool {
        self.options.encrypt
    }

    /// What happens at shutdown to the pages on the device.
    #[must_use]
    pub fn wipe(&self) -> Wipe {
        self.options.wipe
    }
}

fn invalid(key: impl AsRef<str>, reason: impl Into<String>) -> Error {
    Error::Config { key: key.as_ref().to_owned(), reason: reason.into() }
}
