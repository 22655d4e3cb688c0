//! Why an operation failed: one error type for the whole crate.

use crate::base::units::{ByteCount, PageId};
use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation of this crate failed.
///
/// Every message names what was asked for and what to do about it; of a system call's failure the system's words do. In
/// a function of `std::io::Result`, `?` makes an [`io::Error`] of it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A system call failed in a way that has no variant of its own.
    #[error("{call} failed: {}", describe_errno(*.errno))]
    Os {
        /// The system call.
        call: &'static str,
        /// The `errno` value.
        errno: i32,
    },
    /// userfaultfd cannot be used by this process.
    #[error(
        "userfaultfd is not available: {reasons}; `farheap doctor` (from `cargo install farheap-cli`) \
         says which commands allow it"
    )]
    UffdUnavailable {
        /// Each way that was tried, with its refusal.
        reasons: String,
    },
    /// The kernel lacks something that the configuration needs.
    #[error("{feature} is not supported here: {why}; do without it, or use a newer kernel")]
    Unsupported {
        /// The missing thing.
        feature: &'static str,
        /// Its user.
        why: &'static str,
    },
    /// A device or file could not be used as a store.
    #[error("device {}: {reason}", path.display())]
    Device {
        /// The path given.
        path: PathBuf,
        /// Its defect.
        reason: String,
    },
    /// Reading, writing or syncing a store failed.
    #[error(
        "{op} of {}{store} failed: {}", BytesOf { len: *.len, offset: *.offset }, describe_errno(*.errno)
    )]
    Io {
        /// `read`, `write`, `discard` or `sync`.
        op: &'static str,
        /// The [name](crate::store::Store::name) of the store: `file /data/table`.
        store: Arc<str>,
        /// Byte offset on the store.
        offset: u64,
        /// Bytes asked for; 0 for all of the store.
        len: u64,
        /// The `errno` value; `EIO` for a short transfer, `ETIMEDOUT` past the deadline.
        errno: i32,
    },
    /// The store has no place left for a page.
    #[error(
        "{store} is full: all {pages} pages that it has room for are in use; enlarge it, or free data"
    )]
    StoreFull {
        /// The store's name.
        store: Arc<str>,
        /// Pages that the store has room for.
        pages: u64,
    },
    /// The bytes read are not the bytes written.
    #[error(
        "checksum mismatch in slot {slot} of {store}: its bytes are not those written; replace the device"
    )]
    Corrupt {
        /// The store's name.
        store: Arc<str>,
        /// The slot's number.
        slot: u64,
    },
    /// The region has no address range of this size left.
    #[error("no address range of {len} is left in the region; set a larger `span`")]
    AddressSpace {
        /// Bytes asked for.
        len: ByteCount,
    },
    /// A range is empty, unaligned, overflows, or lies outside of the region.
    #[error("bad range: {reason}; give whole pages of what was mapped here")]
    BadRange {
        /// Its defect.
        reason: Cow<'static, str>,
    },
    /// The limit is below what the configuration needs to run.
    #[error("limit {limit} is too small: a heap needs {minimum}; set at least that")]
    LimitTooSmall {
        /// The limit asked for.
        limit: ByteCount,
        /// The smallest that works.
        minimum: ByteCount,
    },
    /// The limit cannot be held: too much is pinned or cannot be written back.
    #[error(
        "resident memory cannot be brought under the limit: {reason}; unpin memory, or raise the limit"
    )]
    LimitExceeded {
        /// Why nothing could be evicted.
        reason: String,
    },
    /// A page of a table file does not hold what was written to it.
    #[error(
        "{page} of {} is corrupt: its checksum is wrong; overwrite it from the log", .table.display()
    )]
    CorruptPage {
        /// The page.
        page: PageId,
        /// The table file.
        table: PathBuf,
    },
    /// A page of a table file is not of the same time as the one that refers to it.
    #[error(
        "{page} of {} is older or newer than the page that refers to it: the table was changed after \
         its last flush, and the changes were cut off by a crash; repeat the log", .table.display()
    )]
    StalePage {
        /// The page.
        page: PageId,
        /// The table file.
        table: PathBuf,
    },
    /// Pages stay in memory, changed, because the log does not hold their records.
    #[error(
        "{pages} changed pages of {} were not written, {first} first, because `before_write` refused \
         them: {reason}; they stay in memory: make the log durable and flush again", .table.display()
    )]
    WriteRefused {
        /// The table file.
        table: PathBuf,
        /// How many.
        pages: u64,
        /// One of them.
        first: PageId,
        /// Answer of the hook.
        reason: String,
    },
    /// A table file has no such page.
    #[error("{page} is not in use: the table file {} has {pages} pages; allocate it first", .table.display())]
    NoSuchPage {
        /// The page asked for.
        page: PageId,
        /// The table file.
        table: PathBuf,
        /// Pages of the file, used and free.
        pages: u64,
    },
    /// A latch was not free in time.
    #[error(
        "timed out after {waited:?} waiting for the latch of {page} of {}, held by {holder}; drop guards sooner, or \
         raise `deadline`",
        .table.display()
    )]
    LatchTimeout {
        /// The page.
        page: PageId,
        /// The table file.
        table: PathBuf,
        /// Its holder.
        holder: String,
        /// How long was waited.
        waited: Duration,
    },
    /// No memory could be freed for a page or an allocation in time.
    #[error(
        "{by}: {wanted} {}: {used} of {limit} are in use ({consumers}); drop guards and memory, or raise the limit",
        why_not(*.waited)
    )]
    OutOfMemory {
        /// Their purpose: a table file, a consumer, or a new limit.
        by: String,
        /// Bytes asked for.
        wanted: ByteCount,
        /// Bytes charged.
        used: ByteCount,
        /// The limit.
        limit: ByteCount,
        /// Bytes that each consumer holds, and how much of it is pinned by how many holders.
        consumers: String,
        /// How long was waited; zero for more than it may have even while all others give way.
        waited: Duration,
    },
    /// A size could not be understood.
    #[error("`{text}` is not a size: write a number of bytes, or one with a unit, such as 512MiB")]
    BadSize {
        /// The text given.
        text: String,
    },
    /// A configuration value is wrong.
    #[error("configuration: {key}: {reason}")]
    Config {
        /// The key, as in `FARHEAP_CONF`.
        key: String,
        /// Defect of its value.
        reason: String,
    },
    /// More consumers than a memory manager can have.
    #[error("a memory manager has {most} consumers, and no room for `{name}`: share a pool")]
    TooManyConsumers {
        /// The consumer that wanted to join.
        name: String,
        /// How many there may be.
        most: usize,
    },
    /// Something that a forked child cannot use.
    #[error(
        "{what} belongs to the parent process and cannot be used in a forked child; start a new program for that"
    )]
    Forked {
        /// Its name.
        what: &'static str,
    },
    /// A heap is already running in this process.
    #[error("a far heap is already running in this process; shut it down before starting another")]
    AlreadyRunning,
    /// No heap is running in this process.
    #[error("no far heap is running in this process; start one, or end it later")]
    NotRunning,
    /// Far allocations are still in use.
    #[error("{bytes} of far memory are still allocated; free it before the heap is shut down")]
    InUse {
        /// Bytes allocated.
        bytes: ByteCount,
    },
    /// The program's jemalloc was built in a way that a far heap cannot use.
    #[error(
        "jemalloc was built with {what} of {found} bytes, and the far heap needs {wanted}: build the \
         program without {variable} in the environment"
    )]
    JemallocBuild {
        /// The part that differs.
        what: &'static str,
        /// Variable of the build that sets it.
        variable: &'static str,
        /// Bytes that it has.
        found: usize,
        /// Bytes that it must have.
        wanted: usize,
    },
    /// jemalloc refused a control call.
    #[error("jemalloc control `{name}` failed: {}", describe_errno(*.errno))]
    Jemalloc {
        /// The control's name.
        name: &'static str,
        /// The `errno` value.
        errno: i32,
    },
}

impl Error {
    /// Returns what kind of failure this is, in std's words.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Error::Os { errno, .. } | Error::Io { errno, .. } | Error::Jemalloc { errno, .. } => {
                io::Error::from_raw_os_error(*errno).kind()
            }
            Error::UffdUnavailable { .. } => io::ErrorKind::PermissionDenied,
            Error::Unsupported { .. } | Error::JemallocBuild { .. } => io::ErrorKind::Unsupported,
            Error::StoreFull { .. } => io::ErrorKind::StorageFull,
            Error::Corrupt { .. } | Error::CorruptPage { .. } | Error::StalePage { .. } => {
                io::ErrorKind::InvalidData
            }
            Error::AddressSpace { .. }
            | Error::LimitExceeded { .. }
            | Error::OutOfMemory { .. } => io::ErrorKind::OutOfMemory,
            Error::BadRange { .. }
            | Error::LimitTooSmall { .. }
            | Error::BadSize { .. }
            | Error::Config { .. } => io::ErrorKind::InvalidInput,
            Error::NoSuchPage { .. } => io::ErrorKind::NotFound,
            Error::LatchTimeout { .. } => io::ErrorKind::TimedOut,
            Error::AlreadyRunning | Error::InUse { .. } => io::ErrorKind::ResourceBusy,
            Error::Device { .. }
            | Error::WriteRefused { .. }
            | Error::TooManyConsumers { .. }
            | Error::Forked { .. }
            | Error::NotRunning => io::ErrorKind::Other,
        }
    }

    /// Refuses a setting.
    pub(crate) fn config(key: &str, reason: impl Into<String>) -> Error {
        Error::Config { key: key.to_owned(), reason: reason.into() }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

/// The end of an attempt to free memory, for a message.
fn why_not(waited: Duration) -> String {
    match waited {
        Duration::ZERO => "are more than it may ever have".to_owned(),
        waited => format!(
            "could not be freed for it within {waited:?}, and nothing more can be reclaimed"
        ),
    }
}

/// The part of a store that a request was for; nothing where it was for all of it.
struct BytesOf {
    len: u64,
    offset: u64,
}

impl fmt::Display for BytesOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.len {
            0 => Ok(()),
            len => write!(f, "{len} bytes at offset {} of ", self.offset),
        }
    }
}

/// Returns `errno` with the system's words for it.
fn describe_errno(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "the text is the system's")]
    fn messages_name_the_call_and_the_cause() {
        let error = Error::Os { call: "mmap", errno: libc::ENOMEM };
        assert_eq!(error.to_string(), "mmap failed: Cannot allocate memory (os error 12)");
    }

    #[test]
    fn an_error_becomes_one_of_std_with_its_kind_and_message() {
        let timeout =
            Error::Io { op: "read", store: "x".into(), offset: 0, len: 0, errno: libc::ETIMEDOUT };
        assert_eq!(timeout.kind(), io::ErrorKind::TimedOut);
        let full = Error::StoreFull { store: "file /x".into(), pages: 9 };
        let message = full.to_string();
        let error = io::Error::from(full);
        assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::StorageFull, message));
    }

    #[test]
    #[cfg_attr(miri, ignore = "the text is the system's")]
    fn messages_name_the_store_and_the_part_of_it() {
        let failed = |op, len| {
            let store = "file /data/table".into();
            Error::Io { op, store, offset: 8192, len, errno: libc::EIO }.to_string()
        };
        let cause = "failed: Input/output error (os error 5)";
        let write = format!("write of 4096 bytes at offset 8192 of file /data/table {cause}");
        assert_eq!(failed("write", 4096), write);
        assert_eq!(failed("sync", 0), format!("sync of file /data/table {cause}"));
    }
}
