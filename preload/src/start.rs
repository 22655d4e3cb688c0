//! Start of the far heap: late, so that a program that uses little memory pays nothing for it.
//!
//! The program's environment is read before `main` ([`VARIABLE`], and `FARHEAP_CONF`). The heap starts when
//! what the program has allocated, mapped or has for variables has grown to [`START`]: from then on its thread watches the
//! process. Everything from before stays local. A start that fails says so
//! on standard error, and the program goes on with local memory, as one does that has a malloc of its own. Uses `own`, `inner`, `report`.

#![expect(unsafe_code, reason = "has a constructor, asks the loader for functions")]

use crate::environment::Environment;
use crate::own::{self, enter};
use crate::{code, descriptors, exec, inner, mapping, report};
use farheap::config::Builder;
use farheap::{ByteCount, Heap};
use libc::{c_char, c_int, c_void};
use std::alloc::{GlobalAlloc, Layout};
use std::arch::asm;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Words separated by commas: `stats` prints statistics at the end; `alone` keeps the library out of
/// the programs that this one starts; `first=PID` names the process that `farheap run` became.
const VARIABLE: &str = "FARHEAP_RUN";

/// Memory that the program has allocated or mapped from which the heap is started: more than the tools of a
/// shell script and an interpreter without a script use; of a small limit no more than 1/START_PART, for it stays local.
/// With 6 MiB of a group of 20 there was no room for code beside that and what a heap needs: the kernel took code away as
/// fast as it was read again.
const START: ByteCount = ByteCount::mib(6);
const START_MIN: ByteCount = ByteCount::mib(1);
const START_PART: u64 = 16;
/// Bytes that a thread allocates before they are counted for all threads, and the minimum between two looks at local
/// memory, which take some microseconds: a look for each of them made a pair of `malloc` and `free` of 16 KiB cost 440 ns.
const COUNT_EVERY: u64 = 256 << 10;
/// How long the allocation that starts the heap waits for it. Not for ever: its thread may hold a lock
/// of the loader that the start wants.
const PATIENCE: Duration = Duration::from_secs(2);

const WAITING: u8 = 0;
const STARTING: u8 = 1;
const OVER: u8 = 2;

/// Bytes that the allocator takes for resident before the program has allocated anything: 2.6 MiB, most of
/// which it has mapped and not touched.
static LOCAL_AT_FIRST: AtomicUsize = AtomicUsize::new(0);
/// Bytes that the program mapped before the heap started.
static MAPPED: AtomicUsize = AtomicUsize::new(0);
/// Bytes that threads have allocated, as far as they are counted; and at how many of them it is looked next.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);
static LOOK_AT: AtomicU64 = AtomicU64::new(0);
static STATE: AtomicU8 = AtomicU8::new(WAITING);
static STARTED: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());
static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Settings of the environment.
#[derive(Debug)]
pub(crate) struct Settings {
    conf: Option<String>,
    pub(crate) stats: bool,
    /// True if statistics are printed also when nothing was far.
    pub(crate) first: bool,
    /// The process that the library was loaded in.
    pub(crate) process: u32,
}

impl Settings {
    /// Resident bytes that the configuration allows the process, and whether those of files count: they do not in a limit
    /// that nobody has named.
    pub(crate) fn limit(&self) -> Option<(ByteCount, bool)> {
        let builder = Heap::builder().parse(self.conf.as_deref()?).ok()?;
        let counts_files = builder.get("limit").is_some_and(|limit| limit != "auto");
        Some((builder.limits().ok()?.0?, counts_files))
    }
}

pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// Memory of this library's own Rust code: never far (invariant 1 of the library).
struct Own;

#[global_allocator]
static OWN: Own = Own;

// SAFETY: blocks come from farheap, which hands out disjoint ones that fit the layout.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let local = Some(farheap::Tier::LOCAL);
        let block = farheap::malloc::allocate(layout.size(), layout.align(), local, false);
        block.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        if let Some(block) = NonNull::new(block) {
            // SAFETY: allocated above, freed once.
            unsafe { farheap::malloc::free(block) }
        }
    }
}

/// Runs before the constructors of the program and `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn(c_int, *mut *mut c_char, *mut *mut c_char) = prepare;

extern "C" fn prepare(_: c_int, _: *mut *mut c_char, variables: *mut *mut c_char) {
    let _inside = enter();
    // SAFETY: what the C library passes to constructors. There is one thread, which uses it through this alone here.
    let mut environment = unsafe { Environment::new(variables) };
    let (process, mut stats, mut is_alone, mut first) = (std::process::id(), false, false, false);
    for word in environment.get(VARIABLE).unwrap_or_default().split(',') {
        stats |= word == "stats";
        is_alone |= word == "alone";
        first |= word.strip_prefix("first=").is_some_and(|pid| pid.parse() == Ok(process));
    }
    if is_alone {
        environment.leave_out("LD_PRELOAD", |path| path.ends_with(b"/libfarheap_preload.so"));
    }
    report::prepare();
    // In a program with a malloc of its own nothing more is done, from here on.
    if let Some(owner) = malloc_of_others() {
        if first || stats {
            report::say(&format!(
                "the far heap does not start, all memory is local, and nothing limits it: the program has a malloc \
                 of its own ({owner})"
            ));
        }
        return;
    }
    // In a program with more rights than its caller has, which can have the library only from a system directory, the
    // variable would name files of the owner's to overwrite.
    // SAFETY: reads a word that the kernel has passed to the process.
    let is_trusted = unsafe { libc::getauxval(libc::AT_SECURE) } == 0;
    let conf = environment.get(Builder::ENV).filter(|_| is_trusted).map(str::to_owned);
    LOCAL_AT_FIRST.store(farheap::malloc::local_resident().as_usize(), Ordering::Relaxed);
    // Not set before: this runs once.
    let _ = SETTINGS.set(Settings { conf, stats, first, process });
    // SAFETY: registers functions that live as long as the program.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    // Of the first thread; others call this when they start (`own`).
    farheap::malloc::watch_end_of_thread();
    descriptors::make_room();
    exec::prepare();
    // After that: what is done around a fork allocates, and there is no lock then that this would wait for.
    farheap::region::watch_forks();
    // SAFETY: the calls that the program makes by the C library hold a `Changing` (invariant 2 of `mapping`), and both functions are
    // registered above. What it does by system calls of its own is outside of that (`book/src/reference/runtimes.md`).
    unsafe { code::let_leave() };
    // The program may fill its variables without a call that arrives here.
    notice_mapping(bytes_of_variables());
}

/// Bytes of the program's own that it may write to, which are in memory once it has. (Those of its libraries are
/// small, or allocated.)
fn bytes_of_variables() -> usize {
    // SAFETY: takes no pointers.
    let [headers, count] =
        [libc::AT_PHDR, libc::AT_PHNUM].map(|kind| unsafe { libc::getauxval(kind) } as usize);
    let parts = (0..if headers == 0 { 0 } else { count }).map(|n| {
        let at = headers + n * size_of::<libc::Elf64_Phdr>();
        // SAFETY: the kernel has mapped this many headers of the program there.
        unsafe { (at as *const libc::Elf64_Phdr).read() }
    });
    let is_writable =
        |part: &libc::Elf64_Phdr| part.p_type == libc::PT_LOAD && part.p_flags & libc::PF_W != 0;
    parts.filter(is_writable).map(|part| part.p_memsz as usize).sum()
}

/// True if this library's malloc is the program's, and its constructor has run. In a program with a malloc of its own
/// none of the other functions does more than the C library's: that malloc calls them with its locks held, and they
/// would come back to it, because the C library allocates what it needs for threads, libraries and files by the name.
#[inline]
pub(crate) fn is_served() -> bool {
    SETTINGS.get().is_some()
}

/// The file that the malloc family is from, by its names; `None`: this library.
///
/// A program without PIE that takes the address of a function has a jump to it there, and a symbol that is undefined: it
/// leads here.
fn malloc_of_others() -> Option<String> {
    // `dlfcn.h` and `elf.h`.
    const RTLD_DL_SYMENT: c_int = 1;
    const SHN_UNDEF: u16 = 0;
    let mut family = [0_usize; 4];
    // SAFETY: reads what the loader has found for the names, from the table of this library.
    unsafe {
        asm!(
            "mov {malloc}, qword ptr [rip + malloc@GOTPCREL]",
            "mov {calloc}, qword ptr [rip + calloc@GOTPCREL]",
            "mov {realloc}, qword ptr [rip + realloc@GOTPCREL]",
            "mov {free}, qword ptr [rip + free@GOTPCREL]",
            malloc = out(reg) family[0],
            calloc = out(reg) family[1],
            realloc = out(reg) family[2],
            free = out(reg) family[3],
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    let object_of = |address: usize| {
        let mut object = MaybeUninit::<libc::Dl_info>::zeroed();
        let mut symbol: *mut libc::Elf64_Sym = std::ptr::null_mut();
        let symbol_at = (&raw mut symbol).cast();
        // SAFETY: there is room for both answers, of which zeros are a value.
        unsafe {
            libc::dladdr1(address as *const c_void, object.as_mut_ptr(), symbol_at, RTLD_DL_SYMENT);
        }
        // SAFETY: an entry of a table that stays as long as the object is loaded, or null.
        let symbol = unsafe { symbol.as_ref() };
        // SAFETY: as above.
        (unsafe { object.assume_init() }, symbol.map(|symbol| symbol.st_shndx))
    };
    let own = object_of((&raw const PREPARE).addr()).0.dli_fbase;
    let mut found = family.map(object_of).into_iter();
    let (other, _) =
        found.find(|(object, place)| object.dli_fbase != own && *place != Some(SHN_UNDEF))?;
    let name = NonNull::new(other.dli_fname.cast_mut());
    // SAFETY: a text of the loader's, which stays as long as the object is loaded.
    let name = name.map(|name| unsafe { CStr::from_ptr(name.as_ptr()) });
    Some(name.map_or_else(String::new, |name| name.to_string_lossy().into_owned()))
}

extern "C" fn before_fork() {
    code::before_fork();
    inner::before_fork();
}

extern "C" fn after_fork() {
    inner::after_fork();
    code::after_fork();
}

extern "C" fn in_child() {
    inner::after_fork();
    // The thread that was starting the heap is the parent's.
    let _ = STATE.compare_exchange(STARTING, OVER, Ordering::Relaxed, Ordering::Relaxed);
}

/// True if the heap has been started, or could not be: no allocation is counted any more.
#[inline]
pub(crate) fn is_over() -> bool {
    STATE.load(Ordering::Relaxed) == OVER
}

/// Counts an allocation of the program; starts the heap when it is time.
#[inline]
pub(crate) fn notice(bytes: usize) {
    if STATE.load(Ordering::Relaxed) == WAITING
        && let Some(sum) = own::count(bytes, COUNT_EVERY)
    {
        count(sum, bytes);
    }
}

/// Counts for all threads, and looks once enough may be in use: what was in use at the last look, and all that was
/// allocated since.
#[cold]
fn count(sum: u64, bytes: usize) {
    if ALLOCATED.fetch_add(sum, Ordering::Relaxed) + sum >= LOOK_AT.load(Ordering::Relaxed) {
        look(bytes);
    }
}

/// Counts memory that the program maps; starts the heap when it is time.
pub(crate) fn notice_mapping(bytes: usize) {
    if STATE.load(Ordering::Relaxed) == WAITING {
        look(bytes);
        MAPPED.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[cold]
fn look(bytes: usize) {
    // The constructor comes first, so that what is allocated before it does not start anything.
    if SETTINGS.get().is_none() {
        return;
    }
    let mapped = MAPPED.load(Ordering::Relaxed).saturating_add(bytes) as u64;
    let first = LOCAL_AT_FIRST.load(Ordering::Relaxed) as u64;
    let allocated = ALLOCATED.load(Ordering::Relaxed);
    let used = farheap::malloc::local_resident().0.saturating_sub(first).saturating_add(mapped);
    let least = if used < START_MIN.0 { START_MIN.0 } else { start_at() };
    if used < least {
        // It cannot be reached before as many bytes have been allocated as are missing.
        let next = allocated + (least - used).max(COUNT_EVERY);
        LOOK_AT.store(next, Ordering::Relaxed);
        return;
    }
    let (from, to) = (WAITING, STARTING);
    if STATE.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_err() {
        return;
    }
    // A thread of its own: it holds none of the locks that this one may hold.
    let start = std::thread::Builder::new().name("farheap-start".to_owned()).spawn(|| {
        if let Err(error) = start() {
            report::say(&format!("the far heap does not start, all memory is local: {error}"));
        }
        over();
    });
    if let Err(error) = start {
        report::say(&format!("the far heap does not start, all memory is local: {error}"));
        return over();
    }
    let (is_over, bell) = &STARTED;
    let held = is_over.lock().unwrap_or_else(PoisonError::into_inner);
    drop(bell.wait_timeout_while(held, PATIENCE, |is_over| !*is_over));
}

/// Bytes in use at which the heap is started.
fn start_at() -> u64 {
    // No lock: a child that is forked while another thread has it would wait for ever. 0: not known yet.
    static BYTES: AtomicU64 = AtomicU64::new(0);
    let known = BYTES.load(Ordering::Relaxed);
    if known > 0 {
        return known;
    }
    let limit = settings().and_then(Settings::limit).map_or(u64::MAX, |(limit, _)| limit.0);
    let bytes = (limit / START_PART).clamp(START_MIN.0, START.0);
    BYTES.store(bytes, Ordering::Relaxed);
    bytes
}

fn over() {
    STATE.store(OVER, Ordering::Release);
    let (is_over, bell) = &STARTED;
    *is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
    bell.notify_all();
}

fn start() -> Result<(), farheap::Error> {
    // As `farheap run` has it, for a library that is preloaded without it.
    let builder = Heap::builder().threshold(farheap::ByteCount::ZERO);
    let conf = SETTINGS.get().and_then(|settings| settings.conf.as_deref());
    let builder = conf.map_or(Ok(builder.clone()), |conf| builder.parse(conf))?;
    if let Some((_, false)) = settings().and_then(Settings::limit) {
        keep_own_code();
    }
    let _low = descriptors::keep_low_numbers();
    // Not `off`, which is no size.
    let threshold = builder.get("threshold").and_then(|text| text.parse().ok());
    mapping::be_far_from(threshold);
    // `off` is for what the program maps.
    let builder = builder.threshold(threshold.unwrap_or(farheap::ByteCount::ZERO));
    builder.start().map(drop)
}

/// Start and end of the loader's code; 0 where it is not known.
static LOADER: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// True if code at an address is the loader's. What it allocates, all threads may touch: farheap's
/// own follow its lists when a library was loaded meanwhile.
#[inline]
pub(crate) fn is_loader(code: usize) -> bool {
    let [start, end] = [0, 1].map(|at: usize| LOADER[at].load(Ordering::Relaxed));
    if end == 0 {
        find_loader();
        return is_loader(code);
    }
    (start..end).contains(&code)
}

/// Returns flags and addresses of the parts of an object, by the headers that it begins with.
///
/// # Safety
/// An ELF object is loaded at `base`, and stays.
unsafe fn loaded_parts(base: usize) -> impl Iterator<Item = (u32, Range<usize>)> {
    // SAFETY: the object begins with this header.
    let header = unsafe { (base as *const libc::Elf64_Ehdr).read() };
    (0..usize::from(header.e_phnum)).filter_map(move |n| {
        let at = base + header.e_phoff as usize + n * size_of::<libc::Elf64_Phdr>();
        // SAFETY: the headers follow, in the part that is mapped first.
        let part = unsafe { (at as *const libc::Elf64_Phdr).read() };
        let start = base + part.p_vaddr as usize;
        (part.p_type == libc::PT_LOAD).then(|| (part.p_flags, start..start + part.p_memsz as usize))
    })
}

/// Locks the code of this library in memory, as it is used, where the process may lock that much: it makes room for the rest.
/// In a small group the kernel took it away as fast as it was read again, so that no room was made, and nothing went on.
#[expect(clippy::disallowed_methods, reason = "the C library has the function since 2.27 only")]
fn keep_own_code() {
    let here: fn() = keep_own_code;
    let mut own = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: fills the structure, of which zeros are a value.
    let is_found = unsafe { libc::dladdr(here as *const c_void, own.as_mut_ptr()) } != 0;
    // SAFETY: zeros, or what the loader has filled in.
    let base = unsafe { own.assume_init() }.dli_fbase as usize;
    // SAFETY: this library is loaded there, and is never unloaded while its code runs.
    let parts =
        (is_found && base != 0).then(|| unsafe { loaded_parts(base) }).into_iter().flatten();
    for (_, code) in parts.filter(|(flags, _)| flags & libc::PF_X != 0) {
        // SAFETY: locks what is mapped there, and nothing where that is refused.
        unsafe { libc::syscall(libc::SYS_mlock2, code.start, code.len(), libc::MLOCK_ONFAULT) };
    }
}

/// Finds where the kernel has mapped the loader.
#[cold]
fn find_loader() {
    // SAFETY: takes no pointers.
    let base = unsafe { libc::getauxval(libc::AT_BASE) } as usize;
    // 0: the loader was called as a program, with this one as its argument.
    // SAFETY: the kernel has mapped the loader there, for good.
    let parts = (base != 0).then(|| unsafe { loaded_parts(base) }).into_iter().flatten();
    let end = parts.map(|(_, part)| part.end).max().unwrap_or(base);
    LOADER[0].store(base, Ordering::Relaxed);
    LOADER[1].store(end.max(1), Ordering::Relaxed);
}
