//! Status codes, the calling thread's last error, and the wall that panics do not pass.

#![expect(unsafe_code, reason = "reads and writes through the caller's pointers")]

use farheap::Error;
use farheap_collections::sub::AllocError;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Result of a function; the values never change their meaning.
pub type farheap_status = u32;

/// Defines the codes and their names.
macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(pub const $name: farheap_status = $value;)*

        /// The name of a code.
        fn name_of(status: farheap_status) -> &'static CStr {
            match status {
                $($value => {
                    // The terminating zero is part of the literal.
                    const NAME: &str = concat!(stringify!($name), "\0");
                    CStr::from_bytes_with_nul(NAME.as_bytes()).expect("one zero, at the end")
                })*
                _ => c"FARHEAP_E_UNKNOWN",
            }
        }
    };
}

codes! {
    FARHEAP_OK = 0,
    FARHEAP_E_NULL = 1,
    FARHEAP_E_HANDLE = 2,
    FARHEAP_E_ABI = 3,
    FARHEAP_E_ARGUMENT = 4,
    FARHEAP_E_PANIC = 5,
    FARHEAP_E_FORKED = 6,
    FARHEAP_E_WOULD_BLOCK = 7,
    FARHEAP_E_CALLBACK = 8,
    FARHEAP_E_OTHER = 9,
    FARHEAP_E_CHANGED = 10,
    FARHEAP_E_OS = 20,
    FARHEAP_E_UFFD_UNAVAILABLE = 21,
    FARHEAP_E_UNSUPPORTED = 22,
    FARHEAP_E_DEVICE = 23,
    FARHEAP_E_IO = 24,
    FARHEAP_E_STORE_FULL = 25,
    FARHEAP_E_CORRUPT = 26,
    FARHEAP_E_ADDRESS_SPACE = 27,
    FARHEAP_E_BAD_RANGE = 28,
    FARHEAP_E_LIMIT_TOO_SMALL = 29,
    FARHEAP_E_LIMIT_EXCEEDED = 30,
    FARHEAP_E_CORRUPT_PAGE = 31,
    FARHEAP_E_NO_SUCH_PAGE = 32,
    FARHEAP_E_LATCH_TIMEOUT = 33,
    FARHEAP_E_OUT_OF_MEMORY = 34,
    FARHEAP_E_BAD_SIZE = 35,
    FARHEAP_E_CONFIG = 36,
    FARHEAP_E_ALREADY_RUNNING = 37,
    FARHEAP_E_NOT_RUNNING = 38,
    FARHEAP_E_IN_USE = 39,
    FARHEAP_E_JEMALLOC = 40,
    FARHEAP_E_TOO_MANY_CONSUMERS = 41,
    FARHEAP_E_WRITE_REFUSED = 42,
    FARHEAP_E_STALE_PAGE = 43,
    FARHEAP_E_FULL = 50,
    FARHEAP_E_TOO_LARGE = 51,
    FARHEAP_E_ALIGN = 52,
}

/// Why a call failed: a code, whose reason has been noted for the calling thread.
///
/// It fits a register, and so do results with it: what is larger goes through memory, where the
/// good results of a call wait for each other's stores and loads (`book/src/measurements/allocations.md`). Of 64
/// bits, so that a good result beside it is not cut in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Failure(NonZeroU64);

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    #[cold]
    pub(crate) fn new(status: farheap_status, message: impl Into<String>) -> Failure {
        Failure::with_errno(status, 0, message.into())
    }

    /// With a message that costs nothing: for what a program meets often, such as a full page.
    #[cold]
    pub(crate) fn plain(status: farheap_status, message: &'static str) -> Failure {
        note(status, 0, message);
        Failure::of(status)
    }

    /// With the `errno` value that goes with it.
    #[cold]
    pub(crate) fn with_errno(status: farheap_status, errno: c_int, message: String) -> Failure {
        note(status, errno, &clip(message));
        Failure::of(status)
    }

    #[cold]
    pub(crate) fn null(what: &str) -> Failure {
        Failure::new(FARHEAP_E_NULL, format!("{what} is NULL"))
    }

    #[cold]
    pub(crate) fn argument(message: impl Into<String>) -> Failure {
        Failure::new(FARHEAP_E_ARGUMENT, message)
    }

    fn of(status: farheap_status) -> Failure {
        Failure(NonZeroU64::new(status.into()).expect("a failure is not FARHEAP_OK"))
    }

    #[inline]
    pub(crate) fn status(self) -> farheap_status {
        self.0.get() as farheap_status
    }
}

impl From<Error> for Failure {
    #[cold]
    fn from(error: Error) -> Failure {
        let (status, errno) = match &error {
            Error::Os { errno, .. } => (FARHEAP_E_OS, *errno),
            Error::UffdUnavailable { .. } => (FARHEAP_E_UFFD_UNAVAILABLE, 0),
            Error::Unsupported { .. } => (FARHEAP_E_UNSUPPORTED, 0),
            Error::Device { .. } => (FARHEAP_E_DEVICE, 0),
            Error::Io { errno, .. } => (FARHEAP_E_IO, *errno),
            Error::StoreFull { .. } => (FARHEAP_E_STORE_FULL, 0),
            Error::Corrupt { .. } => (FARHEAP_E_CORRUPT, 0),
            Error::AddressSpace { .. } => (FARHEAP_E_ADDRESS_SPACE, 0),
            Error::BadRange { .. } => (FARHEAP_E_BAD_RANGE, 0),
            Error::LimitTooSmall { .. } => (FARHEAP_E_LIMIT_TOO_SMALL, 0),
            Error::LimitExceeded { .. } => (FARHEAP_E_LIMIT_EXCEEDED, 0),
            Error::CorruptPage { .. } => (FARHEAP_E_CORRUPT_PAGE, 0),
            Error::NoSuchPage { .. } => (FARHEAP_E_NO_SUCH_PAGE, 0),
            Error::LatchTimeout { .. } => (FARHEAP_E_LATCH_TIMEOUT, 0),
            Error::OutOfMemory { .. } => (FARHEAP_E_OUT_OF_MEMORY, 0),
            Error::BadSize { .. } => (FARHEAP_E_BAD_SIZE, 0),
            Error::Config { .. } => (FARHEAP_E_CONFIG, 0),
            Error::AlreadyRunning => (FARHEAP_E_ALREADY_RUNNING, 0),
            Error::NotRunning => (FARHEAP_E_NOT_RUNNING, 0),
            Error::InUse { .. } => (FARHEAP_E_IN_USE, 0),
            Error::Jemalloc { errno, .. } => (FARHEAP_E_JEMALLOC, *errno),
            Error::JemallocBuild { .. } => (FARHEAP_E_JEMALLOC, 0),
            Error::TooManyConsumers { .. } => (FARHEAP_E_TOO_MANY_CONSUMERS, 0),
            Error::WriteRefused { .. } => (FARHEAP_E_WRITE_REFUSED, 0),
            Error::Forked { .. } => (FARHEAP_E_FORKED, 0),
            Error::StalePage { .. } => (FARHEAP_E_STALE_PAGE, 0),
            // Newer than this library: the message says it.
            _ => (FARHEAP_E_OTHER, 0),
        };
        Failure::with_errno(status, errno, error.to_string())
    }
}

impl From<AllocError> for Failure {
    #[cold]
    fn from(error: AllocError) -> Failure {
        let status = match error {
            AllocError::Full => {
                return Failure::plain(
                    FARHEAP_E_FULL,
                    "the sub-allocator is full; take another one",
                );
            }
            AllocError::TooLarge { .. } => FARHEAP_E_TOO_LARGE,
            AllocError::Align { .. } => FARHEAP_E_ALIGN,
            AllocError::Far(error) => return error.into(),
        };
        Failure::new(status, error.to_string())
    }
}

/// The last failure of a thread. Without a destructor, so that failures of a thread that is at its end
/// are noted too, and leave nothing behind.
struct Last {
    status: Cell<farheap_status>,
    errno: Cell<c_int>,
    /// Ends with a zero.
    message: [Cell<u8>; MESSAGE_MAX],
}

/// Room for a message: for what is kept of a long one, how much is not, and the zero.
const MESSAGE_MAX: usize = HEAD_MAX + TAIL_MAX + 100;

thread_local! {
    static LAST: Last = const {
        Last {
            status: Cell::new(FARHEAP_OK),
            errno: Cell::new(0),
            message: [const { Cell::new(0) }; MESSAGE_MAX],
        }
    };
}

/// Maximum number of bytes of a message's beginning and end that are kept: what a host passed in, such as a
/// configuration, may be of any length.
const HEAD_MAX: usize = 600;
const TAIL_MAX: usize = 300;

/// A message without its middle if it is long.
fn clip(message: String) -> String {
    if message.len() <= HEAD_MAX + TAIL_MAX {
        return message;
    }
    let (head, rest) = message.as_bytes().split_at(HEAD_MAX);
    let (middle, tail) = rest.split_at(rest.len() - TAIL_MAX);
    // A character that was cut becomes a replacement character.
    let [head, tail] = [head, tail].map(String::from_utf8_lossy);
    format!("{head} [{} bytes] {tail}", middle.len())
}

/// Notes a failure for the calling thread.
#[cold]
fn note(status: farheap_status, errno: c_int, message: &str) {
    let bytes = message.bytes().filter(|byte| *byte != 0).take(MESSAGE_MAX - 1);
    LAST.with(|last| {
        last.status.set(status);
        last.errno.set(errno);
        last.message.iter().zip(bytes.chain([0])).for_each(|(to, byte)| to.set(byte));
    });
}

/// Runs the body of a function: returns its code, and catches a panic.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> farheap_status {
    let coded = || body().map_or_else(Failure::status, |()| FARHEAP_OK);
    catch_unwind(AssertUnwindSafe(coded)).unwrap_or_else(|panic| from_panic(&*panic).status())
}

/// As [`call`], for a function that returns a value of its own: `failed` if it fails.
#[inline]
pub(crate) fn value<T: Copy>(failed: T, body: impl FnOnce() -> Result<T>) -> T {
    let made = || body().unwrap_or(failed);
    catch_unwind(AssertUnwindSafe(made)).unwrap_or_else(|panic| {
        let _noted = from_panic(&*panic);
        failed
    })
}

#[cold]
fn from_panic(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    Failure::new(FARHEAP_E_PANIC, format!("a check inside of farheap failed: {text}"))
}

/// Writes a result through an out-parameter.
///
/// # Safety
/// `out` is NULL or may be written to.
#[inline]
pub(crate) unsafe fn write<T>(out: *mut T, value: T) -> Result<()> {
    check_out(out)?;
    // SAFETY: not NULL, so writable as the caller promises; alignment is C's own for the type.
    unsafe { out.write(value) };
    Ok(())
}

#[cold]
fn no_out() -> Failure {
    Failure::null("the out-parameter")
}

/// Checks an out-parameter before work is done for it.
#[inline]
pub(crate) fn check_out<T>(out: *mut T) -> Result<()> {
    if out.is_null() { Err(no_out()) } else { Ok(()) }
}

/// A C string as text.
///
/// # Safety
/// `text` is NULL or a string that ends with a zero and outlives the result.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Failure::null(what));
    }
    // SAFETY: a string, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(format!("{what} is not UTF-8")))
}

/// `count` values as a slice.
///
/// # Safety
/// `first` is NULL or points to `count` values that nobody changes while the result lives.
pub(crate) unsafe fn slice<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Failure::null(what));
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::argument(format!("{count} of {what} are more than memory holds")));
    }
    // SAFETY: not NULL, and as many values as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Copies a structure that both sides know a prefix of: `size` says how much the caller has room
/// for.
///
/// # Safety
/// `out` is NULL or begins with its size in bytes, as a `size_t`, and has that much room.
pub(crate) unsafe fn write_sized<T: Copy>(out: *mut T, value: &T, size_min: usize) -> Result<()> {
    // SAFETY: as the caller promises.
    let size = unsafe { check_sized(out, size_min) }?;
    let len = size.min(size_of::<T>()) - size_of::<usize>();
    let from = std::ptr::from_ref(value).cast::<u8>().wrapping_add(size_of::<usize>());
    let to = out.cast::<u8>().wrapping_add(size_of::<usize>());
    // SAFETY: within both structures behind their size fields, which do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    Ok(())
}

/// Checks such an out-parameter before work is done for it; returns how much room it has.
///
/// # Safety
/// `out` is NULL or begins with its size in bytes, as a `size_t`.
pub(crate) unsafe fn check_sized<T>(out: *mut T, size_min: usize) -> Result<usize> {
    check_out(out)?;
    // SAFETY: the structure begins with its size.
    let size = unsafe { out.cast::<usize>().read() };
    if size < size_min || size > 1 << 16 {
        let message = format!("a size field of {size}: set it to the structure's sizeof first");
        return Err(Failure::argument(message));
    }
    Ok(size)
}

/// A structure of the caller's that may be of a later or an earlier version: `size` says how much of
/// it there is, and what is missing is as in `defaults`.
///
/// # Safety
/// `from` points to a structure that begins with its size in bytes, as a `size_t`.
pub(crate) unsafe fn read_sized<T: Copy>(
    from: *const T,
    size_min: usize,
    init: &str,
    defaults: T,
) -> Result<T> {
    // SAFETY: the structure begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    if !(size_min..=1 << 16).contains(&size) {
        return Err(Failure::argument(format!("config.size is {size}: initialize with {init}")));
    }
    let mut value = defaults;
    let len = size.min(size_of::<T>());
    // SAFETY: as many bytes as both structures have, of plain values.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut value).cast::<u8>(), len);
    };
    Ok(value)
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_last_status() -> farheap_status {
    LAST.with(|last| last.status.get())
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_last_errno() -> c_int {
    LAST.with(|last| last.errno.get())
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_last_message() -> *const c_char {
    LAST.with(|last| last.message.as_ptr().cast())
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_clear_error() {
    note(FARHEAP_OK, 0, "");
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_status_name(status: farheap_status) -> *const c_char {
    name_of(status).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farheap::{ByteCount, PageId};
    use std::panic::resume_unwind;
    use std::time::Duration;

    fn all() -> Vec<(Error, farheap_status)> {
        let (bytes, waited) = (ByteCount::kib(4), Duration::from_secs(1));
        let (page, pages) = (PageId(7), 9);
        vec![
            (Error::Os { call: "mmap", errno: 12 }, FARHEAP_E_OS),
            (Error::UffdUnavailable { reasons: "x".into() }, FARHEAP_E_UFFD_UNAVAILABLE),
            (Error::Unsupported { feature: "a", why: "b" }, FARHEAP_E_UNSUPPORTED),
            (Error::Device { path: "/x".into(), reason: "y".into() }, FARHEAP_E_DEVICE),
            (
                Error::Io { op: "read", store: "file /x".into(), offset: 1, len: 2, errno: 5 },
                FARHEAP_E_IO,
            ),
            (Error::StoreFull { store: "file /x".into(), pages }, FARHEAP_E_STORE_FULL),
            (Error::Corrupt { store: "file /x".into(), slot: 3 }, FARHEAP_E_CORRUPT),
            (Error::AddressSpace { len: bytes }, FARHEAP_E_ADDRESS_SPACE),
            (Error::BadRange { reason: "r".into() }, FARHEAP_E_BAD_RANGE),
            (Error::LimitTooSmall { limit: bytes, minimum: bytes }, FARHEAP_E_LIMIT_TOO_SMALL),
            (Error::LimitExceeded { reason: "r".into() }, FARHEAP_E_LIMIT_EXCEEDED),
            (Error::CorruptPage { page, table: "/x".into() }, FARHEAP_E_CORRUPT_PAGE),
            (
                Error::WriteRefused {
                    table: "/x".into(),
                    pages: 2,
                    first: page,
                    reason: "r".into(),
                },
                FARHEAP_E_WRITE_REFUSED,
            ),
            (Error::NoSuchPage { page, table: "/x".into(), pages: 2 }, FARHEAP_E_NO_SUCH_PAGE),
            (
                Error::LatchTimeout { page, table: "/x".into(), holder: "h".into(), waited },
                FARHEAP_E_LATCH_TIMEOUT,
            ),
            (
                Error::OutOfMemory {
                    by: "/x".into(),
                    wanted: bytes,
                    used: bytes,
                    limit: bytes,
                    consumers: "c".into(),
                    waited,
                },
                FARHEAP_E_OUT_OF_MEMORY,
            ),
            (Error::BadSize { text: "t".into() }, FARHEAP_E_BAD_SIZE),
            (Error::Config { key: "k".into(), reason: "r".into() }, FARHEAP_E_CONFIG),
            (Error::AlreadyRunning, FARHEAP_E_ALREADY_RUNNING),
            (Error::NotRunning, FARHEAP_E_NOT_RUNNING),
            (Error::InUse { bytes }, FARHEAP_E_IN_USE),
            (Error::Jemalloc { name: "n", errno: 22 }, FARHEAP_E_JEMALLOC),
            (
                Error::JemallocBuild { what: "w", variable: "V", found: 1, wanted: 2 },
                FARHEAP_E_JEMALLOC,
            ),
            (Error::TooManyConsumers { name: "n".into(), most: 16 }, FARHEAP_E_TOO_MANY_CONSUMERS),
            (Error::Forked { what: "w" }, FARHEAP_E_FORKED),
            (Error::StalePage { page, table: "/x".into() }, FARHEAP_E_STALE_PAGE),
        ]
    }

    fn last_message() -> String {
        // SAFETY: the thread's message, which nothing replaces before it is copied.
        let text = unsafe { CStr::from_ptr(farheap_last_message()) };
        text.to_str().expect("UTF-8").to_owned()
    }

    #[test]
    fn every_error_has_a_code_of_its_own_and_keeps_its_message() {
        let mut seen = std::collections::HashSet::new();
        for (error, expected) in all() {
            let message = error.to_string();
            assert_eq!(call(|| Err(error.into())), expected);
            assert_eq!((farheap_last_status(), last_message()), (expected, message));
            // Both kinds of trouble with jemalloc have one.
            assert!(seen.insert(expected) || expected == FARHEAP_E_JEMALLOC);
            assert!(name_of(expected).to_bytes().starts_with(b"FARHEAP_E_"));
        }
    }

    #[test]
    fn errors_of_an_allocation_have_codes_and_pass_on_what_is_below() {
        let codes = [
            (AllocError::Full, FARHEAP_E_FULL),
            (AllocError::TooLarge { size: 9, max: 8 }, FARHEAP_E_TOO_LARGE),
            (AllocError::Align { align: 9, max: 8 }, FARHEAP_E_ALIGN),
            (AllocError::Far(Error::NotRunning), FARHEAP_E_NOT_RUNNING),
        ];
        for (error, expected) in codes {
            let message = error.to_string();
            assert_eq!(call(|| Err(error.into())), expected);
            assert_eq!(last_message(), message);
        }
    }

    #[test]
    fn a_panic_becomes_a_code_with_its_message() {
        // As `panic!` does, without a back trace.
        let status = call(|| resume_unwind(Box::new(format!("seven {}", 7))));
        assert_eq!(status, FARHEAP_E_PANIC);
        assert!(last_message().contains("seven 7"), "{}", last_message());
        assert_eq!(value(3, || resume_unwind(Box::new("static"))), 3);
        farheap_clear_error();
        assert_eq!((farheap_last_status(), last_message().as_str()), (FARHEAP_OK, ""));
    }

    #[test]
    fn a_long_message_keeps_its_beginning_and_end() {
        let long = format!("begins{}ends", "\u{20AC}".repeat(1000));
        call(|| Err(Failure::argument(long)));
        let message = last_message();
        assert!(message.starts_with("begins") && message.ends_with("ends"), "{message}");
        assert!(message.len() < 1000 && message.contains(" bytes] "), "{message}");
    }

    #[test]
    fn errno_is_kept_where_there_is_one() {
        assert_eq!(call(|| Err(Error::Os { call: "x", errno: 12 }.into())), FARHEAP_E_OS);
        assert_eq!(farheap_last_errno(), 12);
    }
}
