//! System calls with plain numbers for arguments, so that a table can name them.
#![expect(unsafe_code, reason = "makes system calls on attacked memory")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Number of an error, as the kernel gave it.
pub(crate) type Errno = i32;
/// What a call gave: the bytes that it reports, or its error.
pub(crate) type Outcome = Result<Vec<u8>, Errno>;

/// The calling thread's last error.
pub(crate) fn errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().expect("the call failed")
}

/// Makes a system call. Addresses are those of attacked memory, or of locals that outlive the call.
pub(crate) fn call(number: libc::c_long, args: &[usize]) -> Result<usize, Errno> {
    let mut all = [0; 6];
    all[..args.len()].copy_from_slice(args);
    let [a, b, c, d, e, f] = all;
    #[expect(clippy::disallowed_methods, reason = "any system call may be part of an attack")]
    // SAFETY: the kernel checks every address; what it writes to belongs to the attack, whose
    // memory is only seen through raw pointers.
    let rc = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if rc == -1 { Err(errno()) } else { Ok(rc as usize) }
}

/// The address of a local, for [`call`].
pub(crate) fn addr<T: ?Sized>(local: &T) -> usize {
    std::ptr::from_ref(local).cast::<u8>() as usize
}

/// The address of a local that the kernel writes to, for [`call`].
pub(crate) fn addr_mut<T: ?Sized>(local: &mut T) -> usize {
    std::ptr::from_mut(local).cast::<u8>() as usize
}

pub(crate) fn fd(of: &impl AsRawFd) -> usize {
    of.as_raw_fd() as usize
}

/// Takes ownership of the descriptor that a call returned.
pub(crate) fn owned(fd: usize) -> OwnedFd {
    // SAFETY: a call just returned it, and nothing else knows it.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

/// A file in memory.
pub(crate) fn memory_file() -> OwnedFd {
    let made = call(libc::SYS_memfd_create, &[c"attack".as_ptr() as usize, 0]);
    owned(made.expect("a file in memory"))
}

pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0i32; 2];
    call(libc::SYS_pipe2, &[addr_mut(&mut ends), 0]).expect("a pipe");
    (owned(ends[0] as usize), owned(ends[1] as usize))
}

pub(crate) fn socket_pair(kind: i32) -> (OwnedFd, OwnedFd) {
    let mut ends = [0i32; 2];
    let family = libc::AF_UNIX as usize;
    call(libc::SYS_socketpair, &[family, kind as usize, 0, addr_mut(&mut ends)]).expect("sockets");
    (owned(ends[0] as usize), owned(ends[1] as usize))
}

/// Reads up to `len` bytes into local memory.
pub(crate) fn take(from: &impl AsRawFd, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let n = call(libc::SYS_read, &[fd(from), addr_mut(&mut bytes[..]), len]).expect("readable");
    bytes.truncate(n);
    bytes
}

/// The first `len` bytes of a file.
pub(crate) fn content(of: &impl AsRawFd, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let args = [fd(of), addr_mut(&mut bytes[..]), len, 0];
    let n = call(libc::SYS_pread64, &args).expect("readable");
    bytes.truncate(n);
    bytes
}

/// Puts local bytes at the start of a file.
pub(crate) fn give(to: &impl AsRawFd, bytes: &[u8]) {
    let n = call(libc::SYS_pwrite64, &[fd(to), addr(bytes), bytes.len(), 0]);
    assert_eq!(n, Ok(bytes.len()));
}
