//! Forked children: which process made something, and what a child must not keep of it.
//!
//! A child of `fork(2)` has all descriptors of its parent, and all of its memory but the mappings of
//! `sys::vm`. Descriptors that it keeps would outlive the parent: with a
//! device's go its lock, its claim and the space of a file without a name. So descriptors are
//! [`Private`]: the child closes them before `fork` returns there, but for those that it reads the
//! parent's far memory by ([`Private::share`]). Far addresses that are not inherited stay reserved in
//! the child, without access: else its own allocations would come to lie there, and look far.
//!
//! A value that cleans up when it is dropped asks [`Born`] first: a child inherits the value, but not what
//! it stands for.
//!
//! # Invariants
//! 1. What runs in the child before `fork` returns is async-signal-safe: atomics, `close(2)` and
//!    `mmap(2)`.
//! 2. A descriptor is marked for as long as a [`Private`] of this process owns it, unless it is shared,
//!    or of a thread with a table of its own. (Between the system call and the mark another thread may
//!    fork: that child keeps the descriptor.)

#![expect(unsafe_code, reason = "maps memory in forked children")]

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::cell::Cell;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// Descriptors from here on are not closed in children: the usual bound is 1,024, and few programs
/// raise it so far.
const FDS_MAX: usize = 1 << 16;

/// Numbers that programs rarely choose for descriptors of theirs, as a shell does (`exec 3<file`), the first
/// that the process may have. Standard streams that were closed must not become a store.
const NUMBERS_MIN: [RawFd; 3] = [512, 64, 3];

/// Address ranges that are kept reserved in children; more are not.
const PLACES_MAX: usize = 256;

/// How many forks lie between this process and the first one that used this code.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// One bit per descriptor: it is [`Private`], and not shared.
static PRIVATE: Fds = [const { AtomicU64::new(0) }; FDS_MAX / 64];

/// One bit per descriptor: it is the crate's.
static OWN: Fds = [const { AtomicU64::new(0) }; FDS_MAX / 64];

type Fds = [AtomicU64; FDS_MAX / 64];

static PLACES: [InheritedRange; PLACES_MAX] = [const { InheritedRange::free() }; PLACES_MAX];

/// An address range; free while its start is zero.
struct InheritedRange {
    start: AtomicUsize,
    len: AtomicUsize,
}

impl InheritedRange {
    /// Taken, and not complete.
    const CLAIMED: usize = 1;

    const fn free() -> InheritedRange {
        InheritedRange { start: AtomicUsize::new(0), len: AtomicUsize::new(0) }
    }
}

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Born(u32);

impl Born {
    /// This process.
    pub(crate) fn here() -> Born {
        watch();
        Born(FORKS.load(Ordering::Relaxed))
    }

    /// True if this is the process, and not a forked child of it.
    pub(crate) fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}

/// A value that each process makes for itself, and keeps until it ends: a child's copy of its parent's may be in
/// the middle of a change by a thread that the child does not have.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(Born, T)>);

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This process's value; `None`: it has made none.
    pub(crate) fn get(&self) -> Option<&'static T> {
        // Pairs with the Release in `get_or_make`: the value is visible.
        let made = self.0.load(Ordering::Acquire);
        // SAFETY: null, or from a box that was leaked and that is only read from then on.
        let (born, value) = unsafe { made.as_ref() }?;
        born.is_here().then_some(value)
    }

    /// This process's value, made now if there is none.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        let before = self.0.load(Ordering::Acquire);
        self.get().unwrap_or_else(|| {
            let new = Box::into_raw(Box::new((Born::here(), make())));
            let made = self.0.compare_exchange(before, new, Ordering::Release, Ordering::Relaxed);
            if made.is_err() {
                // Another thread was first.
                // SAFETY: from a box, which nobody else has seen.
                drop(unsafe { Box::from_raw(new) });
            }
            self.get().expect("made by one of them")
        })
    }
}

/// Owner of a descriptor: closed in forked children, where dropping it does nothing.
#[derive(Debug)]
pub struct Private<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    born: Born,
}

impl<T: AsRawFd> Private<T> {
    /// Marks the descriptor as this process's, and the crate's.
    pub fn new(inner: T) -> Private<T> {
        let born = Born::here();
        mark(&PRIVATE, inner.as_raw_fd(), true);
        mark(&OWN, inner.as_raw_fd(), true);
        Private { inner: ManuallyDrop::new(inner), born }
    }

    /// Leaves the descriptor open in children that are forked from now on.
    pub(crate) fn share(&self) {
        mark(&PRIVATE, self.inner.as_raw_fd(), false);
    }

    /// True if this process opened it; else it is closed.
    pub(crate) fn is_here(&self) -> bool {
        self.born.is_here()
    }
}

impl<T: AsRawFd> Deref for Private<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsRawFd> DerefMut for Private<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsRawFd> Drop for Private<T> {
    fn drop(&mut self) {
        if self.born.is_here() {
            // First: the number may be somebody else's as soon as it is closed.
            mark(&PRIVATE, self.inner.as_raw_fd(), false);
            mark(&OWN, self.inner.as_raw_fd(), false);
            // SAFETY: not used after this, the only place that drops it.
            unsafe { ManuallyDrop::drop(&mut self.inner) }
        }
    }
}

thread_local! {
    /// The thread has a table of descriptors of its own, which children do not inherit.
    static HAS_OWN_TABLE: Cell<bool> = const { Cell::new(false) };
}

/// Gives the calling thread a table of descriptors of its own, with none in it but `keep`: what the
/// program opens and closes from now on is not there, nor is what the thread opens in the program's.
/// See `unshare(2)` and `close_range(2)` (Linux 5.9).
///
/// # Errors
/// When the kernel refuses; the thread is to end then.
pub(crate) fn take_own_table(keep: &mut [RawFd]) -> nix::Result<()> {
    // SAFETY: takes no pointers.
    Errno::result(unsafe { libc::unshare(libc::CLONE_FILES) })?;
    HAS_OWN_TABLE.set(true);
    keep.sort_unstable();
    let mut from = 0;
    for end in keep.iter().map(|fd| *fd as libc::c_uint).chain([libc::c_uint::MAX]) {
        if end > from {
            // SAFETY: takes no pointers. The table is this thread's own, which uses no other
            // descriptor than those that are kept.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, from, end - 1, 0) };
            Errno::result(closed)?;
        }
        from = end.saturating_add(1);
    }
    Ok(())
}

/// True if the calling thread has a table of descriptors of its own ([`take_own_table`]).
pub(crate) fn has_own_table() -> bool {
    HAS_OWN_TABLE.get()
}

/// True if a descriptor of the process is the crate's: closing it would end far memory.
pub(crate) fn is_own(fd: RawFd) -> bool {
    let Ok(fd) = usize::try_from(fd) else { return false };
    OWN.get(fd / 64).is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (fd % 64) != 0)
}

/// A descriptor stays the crate's until the process ends.
pub(crate) fn own_for_good(fd: OwnedFd) -> RawFd {
    let fd = fd.into_raw_fd();
    mark(&OWN, fd, true);
    fd
}

/// Gives a descriptor a number that programs rarely choose, if there is one.
pub(crate) fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    copy_out_of_the_way(&fd).unwrap_or(fd)
}

/// A copy of a descriptor, with a higher number, which programs rarely choose. See `F_DUPFD_CLOEXEC` in `fcntl(2)`.
pub(crate) fn copy_out_of_the_way(fd: &(impl AsFd + AsRawFd)) -> Option<OwnedFd> {
    let mut least = NUMBERS_MIN.into_iter().filter(|least| fd.as_raw_fd() < *least && !cfg!(miri));
    let copy = least.find_map(|least| fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(least)).ok())?;
    // SAFETY: the descriptor was just made and nobody else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(copy) })
}

fn mark(fds: &Fds, fd: RawFd, is_set: bool) {
    if HAS_OWN_TABLE.get() {
        return;
    }
    let fd = usize::try_from(fd).expect("an open descriptor");
    let Some(word) = fds.get(fd / 64) else { return };
    let bit = 1 << (fd % 64);
    if is_set {
        word.fetch_or(bit, Ordering::Relaxed);
    } else {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Keeps a range of addresses, which is not inherited, reserved in children.
pub(crate) fn keep_place(start: usize, len: usize) {
    watch();
    let free = PLACES.iter().find(|place| {
        let (free, claimed) = (0, InheritedRange::CLAIMED);
        place.start.compare_exchange(free, claimed, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    });
    if let Some(place) = free {
        place.len.store(len, Ordering::Relaxed);
        place.start.store(start, Ordering::Release);
    }
}

/// The range is about to be unmapped.
pub(crate) fn give_up_place(start: usize) {
    let place = PLACES.iter().find(|place| place.start.load(Ordering::Relaxed) == start);
    if let Some(place) = place {
        place.start.store(0, Ordering::Relaxed);
    }
}

/// Where ranges begin that this process has inherited and can use. (Of more than these, the rest counts as
/// memory that it cannot use.)
static INHERITED: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

/// Notes what a child has inherited: nothing else from now on.
pub(crate) fn note_inherited(starts: impl Iterator<Item = usize>) {
    let mut starts = starts;
    for place in &INHERITED {
        place.store(starts.next().unwrap_or(0), Ordering::Relaxed);
    }
}

/// True if this process has inherited the range that begins at an address, and can use it. Takes no lock:
/// what runs around a fork may ask.
pub(crate) fn is_inherited(start: usize) -> bool {
    INHERITED.iter().any(|inherited| inherited.load(Ordering::Relaxed) == start)
}

/// Descriptors that hold numbers for the pipes of children, in a process that has no other number left. One of a
/// child's two comes back at the fork, the other when the child has ended.
static SPARE: Mutex<Vec<Private<OwnedFd>>> = Mutex::new(Vec::new());

/// Children at once for which there are numbers, less one.
const SPARE_MAX: usize = 8;

/// The list of [`SPARE`]. Whoever locks it stands still, or holds off forks, while one is under way.
fn spare() -> MutexGuard<'static, Vec<Private<OwnedFd>>> {
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    spare.retain(Private::is_here); // A child has closed its parent's.
    spare
}

/// Takes numbers for the pipes of children, as far as the process has any left.
pub(crate) fn reserve_numbers() {
    let mut spare = spare();
    while spare.len() < SPARE_MAX {
        // SAFETY: takes no pointers.
        let Ok(fd) = Errno::result(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }) else { return };
        // SAFETY: the descriptor was just made and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        spare.push(Private::new(out_of_the_way(fd)));
    }
}

/// Keeps the number of a descriptor that nobody uses any more, if there are too few.
pub(crate) fn reserve_number_of(fd: Private<OwnedFd>) {
    let mut spare = spare();
    if spare.len() < SPARE_MAX {
        spare.push(fd);
    }
}

/// Closes an end of a pipe and keeps its number, which never is anybody else's: it becomes one of `other`'s.
pub(crate) fn close_and_reserve(end: OwnedFd, other: &OwnedFd) {
    // SAFETY: takes no pointers. What the number stood for is closed; it stays this function's.
    let kept = unsafe { libc::dup3(other.as_raw_fd(), end.as_raw_fd(), libc::O_CLOEXEC) };
    if kept >= 0 {
        reserve_number_of(Private::new(end));
    }
}

/// Gives all reserved numbers back.
pub(crate) fn release_numbers() {
    spare().clear();
}

/// A pipe whose ends are closed by `exec`: where it is read, and where it is written. Where the process has no
/// descriptor left, two of the reserved numbers serve, and above a limit that was lowered the hard one. See `pipe2(2)`.
///
/// # Errors
/// For want of descriptors.
pub(crate) fn pipe() -> nix::Result<[OwnedFd; 2]> {
    let mut made = open_pipe();
    // One after the other: another thread that opens something may get what is given up here.
    while made == Err(Errno::EMFILE) && spare().pop().is_some() {
        made = open_pipe();
    }
    if made == Err(Errno::EMFILE) {
        let _raised = RaisedLimit::new();
        made = open_pipe();
    }
    Ok(made?.map(|fd| {
        // SAFETY: the descriptor was just made and nobody else owns it.
        out_of_the_way(unsafe { OwnedFd::from_raw_fd(fd) })
    }))
}

fn open_pipe() -> nix::Result<[RawFd; 2]> {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    Errno::result(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }).map(|_| ends)
}

/// The soft limit on descriptors, raised to the hard one until this is dropped. (Another thread may open what it could
/// not have opened before; a child that was just forked has none.) See `getrlimit(2)`.
#[must_use = "the limit is lowered again when this is dropped"]
pub(crate) struct RaisedLimit(Option<(u64, u64)>);

impl RaisedLimit {
    pub(crate) fn new() -> RaisedLimit {
        let before = getrlimit(Resource::RLIMIT_NOFILE).ok().filter(|(soft, hard)| soft < hard);
        let raised =
            |(_, hard): &(u64, u64)| setrlimit(Resource::RLIMIT_NOFILE, *hard, *hard).is_ok();
        RaisedLimit(before.filter(raised))
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        if let Some((soft, hard)) = self.0 {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        }
    }
}

/// File of a descriptor; `None`: it is not open. See `fstat(2)`.
pub(crate) fn file_of(fd: RawFd) -> Option<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: there is room for the answer.
    let known = unsafe { libc::fstat(fd, stat.as_mut_ptr()) } == 0;
    // SAFETY: zeroed is a valid value, and so is what the kernel has written.
    let stat = unsafe { stat.assume_init() };
    known.then_some((stat.st_dev, stat.st_ino))
}

/// The C library's functions that go through its streams.
#[derive(Clone, Copy)]
struct StdioFunctions {
    lock: unsafe extern "C" fn(),
    unlock: unsafe extern "C" fn(),
    begin: unsafe extern "C" fn() -> *const u8,
    end: unsafe extern "C" fn() -> *const u8,
    next: unsafe extern "C" fn(*const u8) -> *const u8,
    file: unsafe extern "C" fn(*const u8) -> *const u8,
}

static STREAMS: OnceLock<Option<StdioFunctions>> = OnceLock::new();

/// Where a stream (`struct _IO_FILE`) has the address of its lock.
const STREAM_LOCK: usize = 0x88;

impl StdioFunctions {
    /// Finds them, where the C library has them (glibc).
    fn find() -> Option<StdioFunctions> {
        Some(StdioFunctions {
            lock: function(c"_IO_list_lock")?,
            unlock: function(c"_IO_list_unlock")?,
            begin: function(c"_IO_iter_begin")?,
            end: function(c"_IO_iter_end")?,
            next: function(c"_IO_iter_next")?,
            file: function(c"_IO_iter_file")?,
        })
    }

    fn touch(self) {
        let StdioFunctions { lock, unlock, begin, end, next, file } = self;
        // SAFETY: takes the lock of the list, which no thread holds while it forks.
        unsafe { lock() };
        // SAFETY: asks for an address.
        let (mut at, end) = (unsafe { begin() }, unsafe { end() });
        while at != end {
            // SAFETY: a stream of the list, which is alive under the lock.
            let stream = unsafe { file(at) };
            // SAFETY: a stream is longer than that.
            let place = unsafe { stream.add(STREAM_LOCK) }.cast::<*const u8>();
            // SAFETY: the stream's own field, which is set when it is on the list.
            let its_lock = unsafe { place.read_volatile() };
            if !its_lock.is_null() {
                // SAFETY: the stream's lock lives as long as the stream.
                let _ = unsafe { its_lock.read_volatile() };
            }
            // SAFETY: as above.
            at = unsafe { next(at) };
        }
        // SAFETY: taken above.
        unsafe { unlock() };
    }
}

/// A function of the C library's by its name.
fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut libc::c_void>()) };
    // SAFETY: the name is a string of C.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: the callers name functions of this type, and the sizes are equal.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// Touches the locks of the C library's streams. It resets them in a child before anything else may run
/// there, and where they are far memory, as in a preloaded program, there is nobody yet who would bring
/// them in (`fork` in glibc, `sysdeps/nptl/fork.c`).
pub(crate) fn touch_streams() {
    if let Some(Some(streams)) = STREAMS.get() {
        streams.touch();
    }
}

/// Starts a thread by the C library alone, which nobody joins: in a child of a fork std may not. It takes a
/// lock at each thread's start and end, of its stack overflow handler. Where another thread of the parent's
/// held that at the moment of the fork, a thread of the child waited for it for ever, and so did the child in
/// `fork`. The C library's own locks it resets. See `pthread_create(3)`.
///
/// # Errors
/// When the kernel has no thread or memory left.
pub(crate) fn start_thread<F>(name: &'static CStr, run: F) -> nix::Result<()>
where
    F: FnOnce() + Send + 'static,
{
    struct NamedStart<F>(&'static CStr, F);
    extern "C" fn begin<F: FnOnce()>(start: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: the box that was given to this thread, and to nobody else.
        let NamedStart(name, run) = *unsafe { Box::from_raw(start.cast::<NamedStart<F>>()) };
        // SAFETY: asks for the calling thread's id.
        let this = unsafe { libc::pthread_self() };
        // SAFETY: the name is a string of C. It is for people: one that is too long is not set.
        unsafe { libc::pthread_setname_np(this, name.as_ptr()) };
        run();
        std::ptr::null_mut()
    }
    let mut thread = 0;
    let start = Box::into_raw(Box::new(NamedStart(name, run)));
    // SAFETY: there is room for the id, no attributes are given, and the thread gets a box of what its
    // function takes.
    let status = unsafe {
        libc::pthread_create(&raw mut thread, std::ptr::null(), begin::<F>, start.cast())
    };
    if status != 0 {
        // SAFETY: no thread was started, so the box is this function's.
        drop(unsafe { Box::from_raw(start) });
        return Err(Errno::from_raw(status));
    }
    // SAFETY: the thread was just started, and nobody joins it.
    unsafe { libc::pthread_detach(thread) };
    Ok(())
}

/// Runs `child` in every child of a `fork` from now on, before `fork` returns there; see
/// `pthread_atfork(3)`. It must be async-signal-safe.
pub(crate) fn in_forked_children(child: extern "C" fn()) {
    // SAFETY: registers a function that lives as long as the program and takes no arguments.
    unsafe { libc::pthread_atfork(None, None, Some(child)) };
}

/// Runs the functions around every `fork` from now on, in the thread that forks: `before` it, and
/// after it in the parent and in the child. See `pthread_atfork(3)`.
pub(crate) fn around_forks(
    before: extern "C" fn(),
    parent: extern "C" fn(),
    child: extern "C" fn(),
) {
    // Before it in the child: what was made before counts as the parent's from then on.
    watch();
    let _ = STREAMS.set(StdioFunctions::find());
    // SAFETY: registers functions that live as long as the program and take no arguments.
    unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
}

/// From now on children of this process are told apart and tidied.
fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        if cfg!(not(miri)) {
            in_forked_children(in_child);
        }
    });
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for (at, word) in PRIVATE.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        OWN[at].fetch_and(!bits, Ordering::Relaxed);
        while bits != 0 {
            let fd = at * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // It is owned by a `Private` of the parent's, which will neither use nor close it in this
            // process.
            let _ = nix::unistd::close(fd as RawFd);
        }
    }
    for place in &PLACES {
        let start = place.start.swap(0, Ordering::Acquire);
        if start > InheritedRange::CLAIMED {
            let len = place.len.load(Ordering::Relaxed);
            // SAFETY: replaces nothing. Should the kernel refuse, the range is free for others, as without this.
            unsafe { map_closed(start, len, MapFlags::MAP_FIXED_NOREPLACE) };
        }
    }
}

/// Takes an inherited range of addresses away from a child: without access, and reserved.
pub(crate) fn take_away(start: usize, len: usize) -> bool {
    // SAFETY: the range is the parent's, which the child can make no use of.
    unsafe { map_closed(start, len, MapFlags::MAP_FIXED) }
}

/// Maps a range without access; `false`: the kernel has refused.
///
/// # Safety
/// Nobody uses what is mapped there, or `fixed` keeps it.
unsafe fn map_closed(start: usize, len: usize, fixed: MapFlags) -> bool {
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | fixed;
    let len = NonZeroUsize::new(len).expect("a range has bytes");
    // SAFETY: as the caller promises.
    unsafe { mmap_anonymous(NonZeroUsize::new(start), len, ProtFlags::PROT_NONE, flags) }.is_ok()
}

#[cfg(all(test, not(miri), not(loom)))]
mod tests {
    use super::*;
    use std::io::{Read, pipe};

    /// Runs `body` in a forked child; returns what it says.
    fn in_fork(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only makes system calls and ends without cleaning up.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let status = i32::from(!body());
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: the status is a valid place to write to.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        status == 0
    }

    fn is_open(fd: RawFd) -> bool {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_child_has_no_private_descriptor_and_closes_none_of_its_own() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let private = Private::new(writer);
        let fd = private.as_raw_fd();
        let mut private = Some(private);
        assert!(in_fork(|| {
            let closed = !is_open(fd);
            // SAFETY: takes no pointers. The number is free, and becomes the child's own.
            let own = unsafe { libc::dup2(1, fd) } == fd;
            let was_here = private.as_ref().is_some_and(Private::is_here);
            drop(private.take());
            closed && own && !was_here && is_open(fd)
        }));
        assert!(is_open(fd) && private.as_ref().is_some_and(Private::is_here));
        drop(private);
        // Nobody else holds it: the pipe has ended.
        assert_eq!(reader.read(&mut [0]).expect("a pipe"), 0);
    }
}
