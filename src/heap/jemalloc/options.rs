//! Asks jemalloc how it was built and configured before a far heap relies on it, and repairs what it can.
//!
//! A program has one jemalloc, which others build and configure too: variables of the build
//! (`JEMALLOC_SYS_WITH_LG_PAGE`), features that other crates switch on (`unprefixed_malloc_on_supported_platforms`
//! renames the symbol with the options), a `malloc_conf` of the program, the environment. So nothing is exported
//! here that a program might export as well: `Cargo.toml` builds jemalloc without `cache_oblivious`, and the rest is
//! read back by [`settle`]. Uses the controls of [`super`].
//!
//! - Pages of 4 KiB and alignments of 16 bytes are what tables and fast paths are made for: anything else is an error.
//! - `dirty_decay_ms` becomes 2,000 where it has jemalloc's default: freed local memory goes back to the kernel within
//!   two seconds, where jemalloc keeps it for ten. What is reused sooner stays with the threads (`thread_cache`), for
//!   whose blocks jemalloc would keep memory a second time: ten threads with short queries had 45 MiB for 0.2 requested.
//! - `background_thread` is switched off: decay is driven by `FarArenas::maintain`, from a thread that never touches
//!   far memory. jemalloc's own threads would call the hooks at times of their choosing.
//! - `cache_oblivious`, `junk`, `zero` and `xmalloc` cannot be changed any more: they are told.

#![expect(unsafe_code, reason = "reads and writes jemalloc's controls")]

use super::{Control, PAGE, arenas};
use crate::base::error::{Error, Result};
use std::ffi::{CStr, c_char};

/// Alignment of all blocks above 8 bytes, `LG_QUANTUM` in jemalloc.
const QUANTUM: usize = super::ALIGN_FREE_ABOVE;

/// jemalloc's default of `dirty_decay_ms`, and what takes its place.
const DECAY_DEFAULT_MS: isize = 10_000;
const DECAY_MS: isize = 2_000;

/// Options that cost a program something, in the words that it is told.
static COSTLY: [(&str, Control<2>, &str); 3] = [
    (
        "cache_oblivious",
        Control::new(c"opt.cache_oblivious"),
        "a block of 16 KiB takes 20, and shares its first page with nobody",
    ),
    ("zero", Control::new(c"opt.zero"), "each new block is filled, and far memory read for it"),
    (
        "xmalloc",
        Control::new(c"opt.xmalloc"),
        "the process is ended where far memory is refused, instead of the allocation failing",
    ),
];

/// Repairs jemalloc's configuration as far as that is possible while it runs. Returns what the program should be
/// told, one sentence each.
///
/// # Errors
/// [`Error::JemallocBuild`] for a jemalloc that a far heap cannot use.
pub(crate) fn settle() -> Result<Vec<String>> {
    check_build(&Build::ask()?)?;
    set_decay()?;
    let mut told = Vec::new();
    told.extend(end_background_threads()?);
    for (name, option, cost) in &COSTLY {
        // SAFETY: yields a `bool`. An error: jemalloc was built without the option.
        if unsafe { option.read::<bool>(&[]) }.unwrap_or(false) {
            told.push(format!("jemalloc runs with `{name}:true`: {cost}"));
        }
    }
    if let Some(junk) = junk().filter(|junk| *junk != c"false") {
        let junk = junk.to_string_lossy();
        told.push(format!(
            "jemalloc runs with `junk:{junk}`: blocks are filled, and far memory read for it"
        ));
    }
    Ok(told)
}

/// How jemalloc was built, as far as code here depends on it.
struct Build {
    page: usize,
    quantum: usize,
}

impl Build {
    fn ask() -> Result<Build> {
        // SAFETY: yields a `size_t`.
        let page = unsafe { control!(c"arenas.page").read(&[]) }?;
        // SAFETY: yields a `size_t`.
        let quantum = unsafe { control!(c"arenas.quantum").read(&[]) }?;
        Ok(Build { page, quantum })
    }
}

fn check_build(build: &Build) -> Result<()> {
    let parts = [
        ("pages", "JEMALLOC_SYS_WITH_LG_PAGE", build.page, PAGE),
        ("a quantum", "JEMALLOC_SYS_WITH_LG_QUANTUM", build.quantum, QUANTUM),
    ];
    match parts.into_iter().find(|(_, _, found, wanted)| found != wanted) {
        Some((what, variable, found, wanted)) => {
            Err(Error::JemallocBuild { what, variable, found, wanted })
        }
        None => Ok(()),
    }
}

/// Shortens the time that freed local memory keeps its contents, where nobody has chosen it.
fn set_decay() -> Result<()> {
    let (new, of_arena) = (control!(c"arenas.dirty_decay_ms"), control!(c"arena.0.dirty_decay_ms"));
    // SAFETY: yields an `ssize_t`.
    if unsafe { new.read::<isize>(&[]) }? == DECAY_DEFAULT_MS {
        // SAFETY: takes an `ssize_t`.
        unsafe { new.write(&[], DECAY_MS) }?;
    }
    for arena in arenas()? {
        let part = [(1, arena.index())];
        // SAFETY: yields an `ssize_t`. An error: the arena has not been used yet.
        if unsafe { of_arena.read::<isize>(&part) } == Ok(DECAY_DEFAULT_MS) {
            // SAFETY: takes an `ssize_t`.
            unsafe { of_arena.write(&part, DECAY_MS) }?;
        }
    }
    Ok(())
}

fn end_background_threads() -> Result<Option<String>> {
    let threads = control!(c"background_thread");
    // SAFETY: yields a `bool`. An error: jemalloc was built without such threads.
    if !unsafe { threads.read::<bool>(&[]) }.unwrap_or(false) {
        return Ok(None);
    }
    // SAFETY: takes a `bool`; jemalloc waits for its threads to end.
    unsafe { threads.write(&[], false) }?;
    let text = "jemalloc's background threads were ended: memory is given back by the heap's own";
    Ok(Some(text.to_owned()))
}

/// The value of the option `junk`; `None` where jemalloc was built without it.
fn junk() -> Option<&'static CStr> {
    // SAFETY: yields a `const char *`.
    let text: usize = unsafe { control!(c"opt.junk").read(&[]) }.ok().filter(|text| *text != 0)?;
    // SAFETY: jemalloc's option is a constant string.
    Some(unsafe { CStr::from_ptr(std::ptr::with_exposed_provenance::<c_char>(text)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jemalloc_with_other_pages_or_alignments_is_refused_with_the_variable_that_makes_it() {
        let refused = |page, quantum| {
            check_build(&Build { page, quantum }).expect_err("another build").to_string()
        };
        let pages = refused(65536, 16);
        assert!(pages.contains("pages of 65536 bytes"), "{pages}");
        assert!(pages.contains("JEMALLOC_SYS_WITH_LG_PAGE"), "{pages}");
        let quantum = refused(4096, 8);
        assert!(quantum.contains("JEMALLOC_SYS_WITH_LG_QUANTUM"), "{quantum}");
    }

    #[test]
    fn settling_repairs_the_decay_and_finds_nothing_to_tell_of_our_own_build() {
        assert_eq!(settle(), Ok(Vec::new()));
        static NEW: Control<2> = Control::new(c"arenas.dirty_decay_ms");
        // SAFETY: yields an `ssize_t`.
        assert_eq!(unsafe { NEW.read(&[]) }, Ok(DECAY_MS));
        static FIRST: Control<3> = Control::new(c"arena.0.dirty_decay_ms");
        // SAFETY: yields an `ssize_t`.
        assert_eq!(unsafe { FIRST.read(&[]) }, Ok(DECAY_MS));
    }
}
