//! Kind of a program's file: whether the loader will preload a library into it.
//!
//! Uses `elf`.

#![expect(unsafe_code, reason = "asks for an attribute of a file")]

use crate::elf::{self, ProgramKind};
use std::ffi::CString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A script's interpreter may be a script: the kernel follows as many.
const SCRIPTS_MAX: usize = 5;
/// Bytes of the line that names an interpreter, as the kernel reads it.
const LINE_MAX: usize = 256;

/// Why a program cannot be run with a preloaded library.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RunRefusal {
    /// No such file.
    Missing,
    /// The kernel would not run it.
    NoProgram(String),
    /// It would run, but without the library.
    Unsuitable(String),
}

/// Finds a program as `execvp(3)` does, and looks at it.
pub(crate) fn check(name: &Path) -> Result<PathBuf, RunRefusal> {
    let path = find(name).ok_or(RunRefusal::Missing)?;
    let mut file = path.clone();
    for _ in 0..SCRIPTS_MAX {
        match interpreter_of(&file)? {
            Some(interpreter) => file = interpreter,
            None => return Ok(path),
        }
    }
    Err(RunRefusal::NoProgram("scripts that run scripts without end".to_owned()))
}

fn find(name: &Path) -> Option<PathBuf> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        return name.exists().then(|| name.to_path_buf());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let found: Vec<_> = std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .filter(|path| path.is_file())
        .collect();
    let runs = |path: &&PathBuf| fs::metadata(path).is_ok_and(|data| is_executable(&data));
    found.iter().find(runs).or(found.first()).cloned()
}

fn is_executable(data: &Metadata) -> bool {
    data.is_file() && data.permissions().mode() & 0o111 != 0
}

/// The interpreter of a script; `None` for a program that the library can be preloaded into.
fn interpreter_of(path: &Path) -> Result<Option<PathBuf>, RunRefusal> {
    let refuse = |error: io::Error| RunRefusal::NoProgram(format!("{}: {error}", path.display()));
    let data = fs::metadata(path).map_err(refuse)?;
    if !is_executable(&data) {
        return Err(RunRefusal::NoProgram(format!("{} is not executable", path.display())));
    }
    // A program that can be run and not read is not looked at.
    let Ok(file) = File::open(path) else { return Ok(None) };
    let mut head = Vec::new();
    (&file).take(LINE_MAX as u64).read_to_end(&mut head).map_err(refuse)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let mut words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
        let name = words.next().unwrap_or_default();
        return Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(name))));
    }
    let kind = elf::kind_of(&file);
    if kind == ProgramKind::Damaged {
        let reason = format!("{}: the headers of the file are damaged", path.display());
        return Err(RunRefusal::NoProgram(reason));
    }
    let refusal = match kind.refusal() {
        Some(refusal) => refusal,
        None if raises_privileges(&data) => {
            "it is set-user-ID or set-group-ID, and the loader ignores LD_PRELOAD there"
        }
        None if !nix::unistd::geteuid().is_root() && has_capabilities(path) => {
            "it has capabilities (setcap), and the loader ignores LD_PRELOAD there"
        }
        None => return Ok(None),
    };
    Err(RunRefusal::Unsuitable(format!("{}: {refusal}", path.display())))
}

/// True if the loader treats the program as one with more privileges than its caller has.
fn raises_privileges(data: &Metadata) -> bool {
    let mode = data.permissions().mode();
    let own = fs::metadata("/proc/self").ok();
    let (user, group) = own.map_or((u32::MAX, u32::MAX), |own| (own.uid(), own.gid()));
    (mode & 0o4000 != 0 && data.uid() != user) || (mode & 0o2000 != 0 && data.gid() != group)
}

/// True if the file gives capabilities to the process that executes it, see `capabilities(7)`.
fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    let (name, nowhere) = (c"security.capability", std::ptr::null_mut());
    // SAFETY: two strings of C; asks for the length alone.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), nowhere, 0) > 0 }
}
