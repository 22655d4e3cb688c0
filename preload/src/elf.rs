//! Reads from an executable file whether the loader can preload a library into it.
//!
//! The command asks before it starts a program, and includes this file; this library before each `exec`: nothing here allocates,
//! and no number in the file is believed. Uses nothing of the crate.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes of the file's header, of a program header, and of an entry of the dynamic section, see `elf(5)`.
const HEADER: usize = 64;
const PART: usize = 56;
const ENTRY: usize = 16;
/// Maximum number of program headers that the kernel takes: 64 KiB of them.
const PARTS_MAX: u64 = (64 << 10) / PART as u64;
/// Maximum length of the loader's path, as the kernel has it.
const PATH_MAX: usize = 4096;
/// Maximum number of entries of the dynamic section that are looked at: a linker writes some 30, and one for each library.
const ENTRIES_MAX: u64 = 1024;
/// Bytes of the file that are looked at together.
const BLOCK: usize = 4096;

const X86_64: u64 = 62;
const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
const INTERPRETER: u64 = 3;
const STRINGS: u64 = 5;
const STRINGS_SIZE: u64 = 10;

/// Parts of the path of a loader that is not the GNU C library's.
const OTHER_LOADERS: [&[u8]; 3] = [b"ld-musl", b"uClibc", b"/linker64"];
/// Beginnings of strings that a program built with a sanitizer has: a function that its code calls, a library that it needs.
const SANITIZERS: [(&[u8], &str); 5] = [
    (b"\0__asan_init\0", "it is built with AddressSanitizer, which has a malloc of its own"),
    (b"\0__tsan_init\0", "it is built with ThreadSanitizer, which has a malloc of its own"),
    (b"\0__msan_init\0", "it is built with MemorySanitizer, which has a malloc of its own"),
    (b"\0__hwasan_init\0", "it is built with HWAddressSanitizer, which has a malloc of its own"),
    (b"\0liblsan.so", "it is built with LeakSanitizer, which has a malloc of its own"),
];
/// Bytes of the longest of them.
const NAME_MAX: usize = 16;

/// A kind of executable file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    /// No ELF file: a script perhaps.
    Other,
    /// The loader preloads into it.
    Dynamic,
    /// No loader is asked.
    Static,
    /// For another processor, or of 32 bits.
    OtherMachine,
    /// For another C library than GNU's.
    OtherLibrary,
    /// Built with a sanitizer, which this text names.
    Sanitizer(&'static str),
    /// The kernel does not execute it.
    Damaged,
}

impl ProgramKind {
    /// Why nothing can be preloaded into such a file, unless the kernel refuses it anyway.
    pub(crate) fn refusal(self) -> Option<&'static str> {
        match self {
            ProgramKind::Other | ProgramKind::Dynamic | ProgramKind::Damaged => None,
            ProgramKind::Static => {
                Some("it is linked statically, so that nothing can be preloaded into it")
            }
            ProgramKind::OtherMachine => Some("it is not a program for x86-64"),
            ProgramKind::OtherLibrary => Some("it uses another C library than GNU's"),
            ProgramKind::Sanitizer(text) => Some(text),
        }
    }
}

/// Looks at a file.
pub(crate) fn kind_of(file: &File) -> ProgramKind {
    let mut header = [0; HEADER];
    let got = read(file, &mut header, 0);
    if !header.starts_with(b"\x7fELF") {
        return ProgramKind::Other;
    }
    if header[4] != 2 || number(&header, 18, 2) != X86_64 {
        return ProgramKind::OtherMachine;
    }
    let count = number(&header, 56, 2);
    let are_parts_good = number(&header, 54, 2) == PART as u64 && (1..=PARTS_MAX).contains(&count);
    if got < HEADER || !are_parts_good {
        return ProgramKind::Damaged;
    }
    let parts = Parts { file, start: number(&header, 32, 8), count };
    parts.kind().unwrap_or(ProgramKind::Damaged)
}

/// The program headers of a file.
struct Parts<'a> {
    file: &'a File,
    start: u64,
    count: u64,
}

/// A program header.
struct ProgramHeader {
    kind: u64,
    offset: u64,
    address: u64,
    len: u64,
}

impl Parts<'_> {
    /// `None`: the file is damaged.
    fn kind(&self) -> Option<ProgramKind> {
        // All of them, so that headers that cannot be read are noticed.
        for n in 0..self.count {
            self.part(n)?;
        }
        let Some(loader) = self.find(|part| part.kind == INTERPRETER) else {
            return Some(ProgramKind::Static);
        };
        let mut path = [0; PATH_MAX];
        let path = path.get_mut(..usize::try_from(loader.len).ok()?)?;
        if read(self.file, path, loader.offset) < path.len() {
            return None;
        }
        let is_in_path = |name: &&[u8]| path.windows(name.len()).any(|part| part == *name);
        if OTHER_LOADERS.iter().any(is_in_path) {
            return Some(ProgramKind::OtherLibrary);
        }
        let sanitizer = self.strings().and_then(|(start, len)| sanitizer_in(self.file, start, len));
        Some(sanitizer.map_or(ProgramKind::Dynamic, ProgramKind::Sanitizer))
    }

    fn part(&self, n: u64) -> Option<ProgramHeader> {
        let mut part = [0; PART];
        let at = self.start.checked_add(n * PART as u64)?;
        let field = |part: &[u8; PART], at| number(part, at, 8);
        (read(self.file, &mut part, at) == PART).then(|| ProgramHeader {
            kind: number(&part, 0, 4),
            offset: field(&part, 8),
            address: field(&part, 16),
            len: field(&part, 32),
        })
    }

    fn find(&self, is: impl Fn(&ProgramHeader) -> bool) -> Option<ProgramHeader> {
        (0..self.count).filter_map(|n| self.part(n)).find(is)
    }

    /// Where the strings of the dynamic section are in the file, and how many bytes; `None` where the file does not tell.
    fn strings(&self) -> Option<(u64, u64)> {
        let dynamic = self.find(|part| part.kind == DYNAMIC)?;
        let value = |tag: u64| {
            (0..(dynamic.len / ENTRY as u64).min(ENTRIES_MAX)).find_map(|n| {
                let mut entry = [0; ENTRY];
                let at = dynamic.offset.checked_add(n * ENTRY as u64)?;
                let is_it = read(self.file, &mut entry, at) == ENTRY && number(&entry, 0, 8) == tag;
                is_it.then(|| number(&entry, 8, 8))
            })
        };
        let (address, len) = (value(STRINGS)?, value(STRINGS_SIZE)?);
        let behind = |part: &ProgramHeader| address.checked_sub(part.address);
        let holds = |part: &ProgramHeader| behind(part).is_some_and(|behind| behind < part.len);
        let part = self.find(|part| part.kind == LOAD && holds(part))?;
        Some((part.offset.checked_add(behind(&part)?)?, len))
    }
}

/// The sanitizer that a table of strings names. What the file ends before is not looked at.
fn sanitizer_in(file: &File, start: u64, len: u64) -> Option<&'static str> {
    // A block begins with the end of the last one, in which a name may have begun.
    let mut block = [0; NAME_MAX + BLOCK];
    let mut at = 0;
    while at < len {
        let wanted = usize::try_from(len - at).unwrap_or(BLOCK).min(BLOCK);
        let got = read(file, &mut block[NAME_MAX..][..wanted], start.checked_add(at)?);
        let all = &block[..NAME_MAX + got];
        let strings =
            all.iter().enumerate().filter(|(_, byte)| **byte == 0).map(|(at, _)| &all[at..]);
        let named = |string: &[u8]| SANITIZERS.iter().find(|(name, _)| string.starts_with(name));
        if let Some((_, name)) = strings.filter_map(named).next() {
            return Some(name);
        }
        if got < wanted {
            return None;
        }
        block.copy_within(got..got + NAME_MAX, 0);
        at += got as u64;
    }
    None
}

/// Reads as many bytes as there are; what it cannot read is not there.
fn read(file: &File, to: &mut [u8], at: u64) -> usize {
    let mut got = 0;
    while got < to.len() {
        match file.read_at(&mut to[got..], at + got as u64) {
            Ok(0) | Err(_) => break,
            Ok(more) => got += more,
        }
    }
    got
}

/// A number in a header that holds it.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let mut word = [0; 8];
    word[..len].copy_from_slice(&bytes[at..at + len]);
    u64::from_le_bytes(word)
}
