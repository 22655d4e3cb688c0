//! The only module that makes system calls. Uses `base`.
//!
//! A wrapper takes typed arguments, retries `EINTR` where that is right, gives expected `errno`
//! values a meaning, and cites the man page.

#![expect(clippy::disallowed_methods, reason = "system calls are made here and nowhere else")]

pub(crate) mod access;
#[cfg(feature = "heap")]
pub(crate) mod block;
pub(crate) mod buffer;
#[cfg(feature = "heap")]
pub(crate) mod ending;
pub(crate) mod environment;
pub(crate) mod event;
pub(crate) mod file;
pub(crate) mod fork;
pub(crate) mod inherited;
pub(crate) mod kernel;
pub(crate) mod layers;
pub(crate) mod map_anew;
pub(crate) mod membarrier;
#[doc(hidden)]
pub mod messages;
pub(crate) mod pagemap;
pub mod probe;
pub(crate) mod shared_text;
pub(crate) mod signal;
pub(crate) mod signals;
pub(crate) mod statm;
pub(crate) mod stderr;
pub(crate) mod thread;
pub(crate) mod uffd;
pub(crate) mod uring;
pub(crate) mod vm;

use crate::base::error::{Error, Result};
use std::io::Read;

pub(crate) use libc::{
    EAGAIN, EBUSY, EEXIST, EINVAL, EIO, EMFILE, ENFILE, ENOENT, ENOMEM, ENOSPC, EPERM, ESRCH,
    ETIMEDOUT,
};

/// The number of a refusal of the kernel's, also where `nix` has no name for it.
pub(crate) fn raw(errno: nix::errno::Errno) -> i32 {
    match errno {
        nix::errno::Errno::UnknownErrno => nix::errno::Errno::last_raw(),
        errno => errno as i32,
    }
}

/// Makes the kernel's refusal of `call` the crate's error.
pub(crate) fn refused(call: &'static str) -> impl Fn(nix::errno::Errno) -> Error {
    move |errno| Error::Os { call, errno: raw(errno) }
}

/// Makes the failure of a call of the standard library's, by which it makes `call`, the crate's error.
pub(crate) fn failed(call: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::Os { call, errno: error.raw_os_error().unwrap_or(EIO) }
}

/// Fills a buffer with random bytes from `/dev/urandom`, see `random(4)`.
pub(crate) fn random_bytes(bytes: &mut [u8]) -> Result<()> {
    let mut read = || std::fs::File::open("/dev/urandom")?.read_exact(bytes);
    read().map_err(failed("read(/dev/urandom)"))
}

/// A random number.
pub(crate) fn random_u64() -> Result<u64> {
    let mut bytes = [0; 8];
    random_bytes(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
