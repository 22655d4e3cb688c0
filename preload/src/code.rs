//! Takes the code and constants of loaded programs and libraries out of the process's resident memory.
//!
//! `madvise(2)` with `MADV_DONTNEED` drops a page of a private file mapping from the process; the page stays in
//! the kernel's cache of files, and a touch maps it again without a read. It needs no
//! privilege, where `MADV_PAGEOUT` does nothing for files of other users, and reads them anew. But what the
//! process has written there would be lost. So `Code` drops only what the file holds.
//!
//! The kernel maps 16 pages for one that is touched, of which most programs use a few: what came back at once was half of what had
//! left. So mappings that leave are registered with a userfaultfd (`Alone`), where it maps only what is touched.
//!
//! # Invariants
//! 1. A page is dropped only while its object is loaded (`dl_iterate_phdr(3)` keeps it so), in a segment that the loader never
//!    writes, which the process cannot write at this time, and where the kernel says that the page is the file's.
//! 2. Nobody maps over it, unmaps it, or makes it writable meanwhile: who does holds a [`Changing`]. Without
//!    [`let_leave`], by which a program's owner says that all do, nothing is dropped.
//! 3. No fork happens while this module holds the loader's lock: the child would have it locked for good. (System calls
//!    of the program's own, and `_Fork(3)`, are not noticed; see `ForkWord` for what their children do.)

#![expect(unsafe_code, reason = "walks the loaded objects and drops pages of their files")]
#![expect(
    clippy::disallowed_methods,
    reason = "asks the kernel, past the functions that this library exports"
)]

use crate::advice::kernel_madvise;
use farheap::host::{self, Pagemap, Private, Uffd};
use libc::{c_int, c_void, dl_phdr_info};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// How long a fork waits for [`Code::drop_resident`]. It takes milliseconds, unless it waits for the loader's lock: then it
/// may be the forking thread that has the lock, and nobody else has it in the child.
const FORK_WAIT_MAX: Duration = Duration::from_secs(1);

// linux/elf.h, of segments and of the dynamic section.
const DT_TEXTREL: i64 = 22;
const DT_FLAGS: i64 = 30;
const DF_TEXTREL: u64 = 4;

// linux/fs.h, `enum procmap_query_flags`.
const VMA_WRITABLE: u64 = 2;
const VMA_SHARED: u64 = 8;
const COVERING_OR_NEXT: u64 = 16;

/// linux/fs.h, `struct procmap_query`, of which no name and no build id is asked for.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    start: u64,
    end: u64,
    flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_and_build_id_sizes: [u32; 2],
    name_and_build_id: [u64; 2],
}

/// `PROCMAP_QUERY`, `_IOWR('f', 17, struct procmap_query)`.
const QUERY: libc::Ioctl = 3 << 30 | 104 << 16 | (b'f' as libc::Ioctl) << 8 | 17;
const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// `UFFD_FEATURE_WP_ASYNC`: a write to a protected page ends its protection.
const WP_ASYNC: u64 = 1 << 15;

/// How long a thread sleeps that waits for an object's pages to be dropped. It does not yield: `sched_yield(2)` lets no thread of a
/// lower priority run, so that a real-time thread kept the dropping one from its processor for a second at a time.
const LOOK_AGAIN_NS: i64 = 50_000;

/// Opened when code leaves first; `None` where it cannot.
static CODE: OnceLock<Option<Code>> = OnceLock::new();
static STATE: ForkWord = ForkWord {
    changing: AtomicU32::new(0),
    walking: AtomicBool::new(false),
    dropping: AtomicBool::new(false),
};

/// Word that threads share. It is a page of its own, which the kernel fills with zeros in the child of any fork
/// (`MADV_WIPEONFORK`): the threads that would end what is under way are the parent's. A child made by `_Fork(3)` or a system call,
/// which calls no function that is registered for forks, waited in `munmap` for ever.
#[repr(C, align(4096))]
struct ForkWord {
    /// Threads that change mappings, or fork.
    changing: AtomicU32,
    /// The loader's lock is taken, or waited for.
    walking: AtomicBool,
    /// An object's pages are being dropped.
    dropping: AtomicBool,
}

const _: () = assert!(size_of::<ForkWord>() == PAGE);

/// From now on code may leave. See `MADV_WIPEONFORK` in `madvise(2)` (Linux 4.14).
///
/// # Safety
/// Threads that make mappings of files writable, replace or remove them, hold a [`Changing`] meanwhile: else what they write
/// there can be lost. [`before_fork`] and [`after_fork`] are called around forks: else a child can find the loader's lock taken.
pub(crate) unsafe fn let_leave() {
    let page = (&raw const STATE).cast_mut().cast();
    // SAFETY: the page is all of `STATE`, which another process sees as zeros from now on, values of its fields.
    if unsafe { kernel_madvise(page, PAGE, libc::MADV_WIPEONFORK) } == 0 {
        host::let_code_leave_by(|| {
            if let Some(code) = CODE.get_or_init(Code::open) {
                code.drop_resident();
            }
        });
    }
}

/// A thread is changing mappings: nothing is dropped meanwhile.
#[derive(Debug)]
pub(crate) struct Changing(());

impl Changing {
    /// Waits until nothing is being dropped: at most the milliseconds that one object takes.
    #[must_use]
    pub(crate) fn begin() -> Changing {
        loop {
            // Sequentially consistent, as in `visit`: of this thread and that one, one sees the other.
            STATE.changing.fetch_add(1, Ordering::SeqCst);
            if !STATE.dropping.load(Ordering::SeqCst) {
                return Changing(());
            }
            STATE.changing.fetch_sub(1, Ordering::SeqCst);
            while STATE.dropping.load(Ordering::SeqCst) {
                sleep();
            }
        }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        STATE.changing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sleeps for [`LOOK_AGAIN_NS`], or until a signal arrives. The C library's function would end a thread that was cancelled
/// (`pthread_cancel(3)`), which `munmap` and its like never do.
fn sleep() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN_NS };
    let rest = std::ptr::null_mut::<libc::timespec>();
    // SAFETY: a time, and no place for what is left of it.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, rest) };
}

/// To be called before a fork: waits until nobody has the loader's lock for this module.
pub(crate) fn before_fork() {
    STATE.changing.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    while STATE.walking.load(Ordering::SeqCst) && began.elapsed() < FORK_WAIT_MAX {
        sleep();
    }
}

/// To be called after it in the parent. (The child's `ForkWord` is zeros.)
pub(crate) fn after_fork() {
    STATE.changing.fetch_sub(1, Ordering::SeqCst);
}

/// The code of this process.
#[derive(Debug)]
struct Code {
    maps: Private<File>,
    pagemap: Pagemap,
    /// `None` where the kernel maps the neighbours of what is touched, too.
    alone: Option<Alone>,
}

/// Keeps the kernel from mapping the neighbours of a page that is touched.
///
/// It maps none where a userfaultfd watches writes, because they might be protected (`uffd_disable_fault_around` in
/// `linux/userfaultfd_k.h`). No page is protected here, and a write to one that is would only end its protection
/// (`UFFD_FEATURE_WP_ASYNC`, Linux 6.7). So no thread ever waits for this descriptor, and none reads it.
#[derive(Debug)]
struct Alone(Uffd);

impl Alone {
    fn open() -> Option<Alone> {
        Uffd::open(WP_ASYNC, 0, false).ok().map(Alone)
    }

    /// Registers a mapping, so that its pages come one by one, if the kernel can: one that the program watches itself stays as it is.
    fn register(&self, mapping: &ProcmapQuery) {
        let (start, end) = (mapping.start as usize, mapping.end as usize);
        let _ = self.0.register_unwatched(start, end - start);
    }
}

impl Code {
    /// `None` where the kernel does not tell enough: `PROCMAP_QUERY` (Linux 6.11).
    fn open() -> Option<Code> {
        let maps = File::open("/proc/thread-self/maps").ok().map(Private::new)?;
        let code = Code { maps, pagemap: Pagemap::open().ok()??, alone: Alone::open() };
        code.mapping_from(0)?;
        Some(code)
    }

    /// Drops all that is resident of code and constants. What is in use comes back page by page where [`Alone`] works.
    fn drop_resident(&self) {
        STATE.walking.store(true, Ordering::SeqCst);
        // Someone who forks has not seen that, perhaps.
        if STATE.changing.load(Ordering::SeqCst) == 0 {
            // SAFETY: the function takes what is passed here, which outlives the call.
            unsafe { libc::dl_iterate_phdr(Some(visit), (&raw const *self).cast_mut().cast()) };
        }
        STATE.walking.store(false, Ordering::SeqCst);
    }

    /// Drops what is resident of a range of a loaded object, but for what the process may have written.
    fn drop_range(&self, range: Range<usize>) {
        let mut at = range.start;
        while at < range.end
            && let Some(mapping) = self.mapping_from(at)
            && (mapping.start as usize) < range.end
        {
            let part = at.max(mapping.start as usize)..range.end.min(mapping.end as usize);
            at = part.end;
            let is_of_file = mapping.inode != 0;
            if is_of_file && mapping.flags & (VMA_WRITABLE | VMA_SHARED) == 0 {
                if let Some(alone) = &self.alone {
                    alone.register(&mapping);
                }
                self.drop_pages(part);
            }
        }
    }

    /// Drops the resident pages of a part of a mapping that are the file's.
    fn drop_pages(&self, part: Range<usize>) {
        let mut at = part.start;
        while at < part.end
            && let Ok(Some((start, end))) = self.pagemap.next_of_file(at, part.end)
        {
            let (place, len) = (std::ptr::without_provenance_mut(start), end - start);
            // SAFETY: the pages are of a file, unwritten, and stay so and mapped (invariants 1 and 2): the next
            // touch finds the same bytes. Pages that are locked stay (`EINVAL`).
            unsafe { kernel_madvise(place, len, libc::MADV_DONTNEED) };
            at = end;
        }
    }

    /// The first mapping that ends above an address.
    fn mapping_from(&self, at: usize) -> Option<ProcmapQuery> {
        let mut mapping = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_flags: COVERING_OR_NEXT,
            query_addr: at as u64,
            ..ProcmapQuery::default()
        };
        // SAFETY: the argument is as the kernel defines it, with room for no name.
        let found = unsafe { libc::ioctl(self.maps.as_raw_fd(), QUERY, &raw mut mapping) };
        (found == 0).then_some(mapping)
    }
}

/// Drops an object's pages; called by the loader, which has its lock: neither allocates nor waits.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, _size: usize, code: *mut c_void) -> c_int {
    // SAFETY: the loader passes an object that it knows, for the length of the call.
    let info = unsafe { &*info };
    // SAFETY: what `drop_resident` has passed, which borrows it for the length of the walk.
    let code = unsafe { &*code.cast_const().cast::<Code>() };
    STATE.dropping.store(true, Ordering::SeqCst);
    if STATE.changing.load(Ordering::SeqCst) == 0 && !info.dlpi_phdr.is_null() {
        // SAFETY: the object's headers are mapped with it.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        if !loader_writes_code(info.dlpi_addr, headers) {
            let ranges = headers.iter().filter_map(|header| constant(info.dlpi_addr, header));
            ranges.for_each(|range| code.drop_range(range));
        }
    }
    STATE.dropping.store(false, Ordering::SeqCst);
    0
}

/// The whole pages of a segment that is loaded and never written.
fn constant(base: u64, header: &libc::Elf64_Phdr) -> Option<Range<usize>> {
    let is_constant = header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0;
    let start = base.wrapping_add(header.p_vaddr) as usize;
    let end = start.checked_add(header.p_filesz as usize)?;
    let pages = start.next_multiple_of(PAGE)..end / PAGE * PAGE;
    (is_constant && !pages.is_empty()).then_some(pages)
}

/// True if the loader relocates what is not writable: it makes that writable for a while, without a [`Changing`].
fn loader_writes_code(base: u64, headers: &[libc::Elf64_Phdr]) -> bool {
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else {
        return false; // Linked statically: nothing is relocated.
    };
    let start = base.wrapping_add(dynamic.p_vaddr) as usize;
    let entry = size_of::<[u64; 2]>();
    let entries = (0..dynamic.p_memsz as usize / entry).map(|n| {
        let at = std::ptr::without_provenance::<[u64; 2]>(start + n * entry);
        // SAFETY: within the object's dynamic section, which is mapped as long as the object is.
        unsafe { at.read_volatile() }
    });
    entries.take_while(|[tag, _]| *tag != 0).any(|[tag, value]| match tag as i64 {
        DT_TEXTREL => true,
        DT_FLAGS => value & DF_TEXTREL != 0,
        _ => false,
    })
}
