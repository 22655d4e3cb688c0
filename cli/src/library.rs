//! Finds `libfarheap_preload.so`: named by a variable, beside this program, or embedded in it.
//!
//! A package manager puts the library beside the program or in a directory for libraries. `cargo install` installs
//! programs only: there `build.rs` embeds the library, and it is written to the cache directory of its user.
//! Uses nothing of the crate.
//!
//! # Invariants
//! 1. What the loader is told to preload from a cache has the embedded bytes, and lies where only its user and root
//!    can write: in no directory on the way there could another user have put something else.

use nix::sys::statvfs::{FsFlags, fstatvfs};
use nix::unistd::{Uid, User, geteuid};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const LIBRARY: &str = "libfarheap_preload.so";
/// The library's path, for one that is in no usual place.
const LIBRARY_VARIABLE: &str = "FARHEAP_PRELOAD_LIBRARY";
/// Where installations have libraries, from the program's directory.
const PLACES: [&str; 4] = [".", "../lib", "../lib64", "../lib/x86_64-linux-gnu"];
/// Mode bits by which others than the owner may write.
const OTHERS_WRITE: u32 = 0o022;
/// Only owners rename and remove what is in such a directory.
const STICKY: u32 = 0o1000;

/// A library that is part of this program.
struct Embedded {
    /// Contains a hash of the bytes, so that versions lie side by side.
    name: &'static str,
    bytes: &'static [u8],
}

#[cfg(embedded_library)]
const EMBEDDED: Option<Embedded> = Some(Embedded {
    name: env!("FARHEAP_LIBRARY_NAME"),
    bytes: include_bytes!(concat!(env!("OUT_DIR"), "/libfarheap_preload.so")),
});
#[cfg(not(embedded_library))]
const EMBEDDED: Option<Embedded> = None;

/// Finds the library, in a place that the loader accepts.
pub(crate) fn find() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        let path = PathBuf::from(path);
        return match path.canonicalize() {
            Ok(path) => preloadable(path),
            Err(error) => Err(format!("{LIBRARY_VARIABLE}: {}: {error}", path.display())),
        };
    }
    let own = std::env::current_exe().map_err(|error| format!("this program's path: {error}"))?;
    let dir = own.parent().unwrap_or(Path::new("/"));
    let found = PLACES.iter().find_map(|place| dir.join(place).join(LIBRARY).canonicalize().ok());
    match (found, EMBEDDED) {
        (Some(path), _) => preloadable(path),
        (None, Some(embedded)) => unpack(&embedded, &caches()),
        (None, None) => Err(format!(
            "{LIBRARY} is neither in {dir} nor in {dir}/../lib, and not embedded in this build of the command; \
             `cargo build --release -p farheap-preload` in farheap's repository builds it, {LIBRARY_VARIABLE} names \
             it in another place",
            dir = dir.display()
        )),
    }
}

/// Refuses a path that the loader would take for several (`ld.so(8)`, `LD_PRELOAD`): it would say so, and run the program
/// on its own memory.
fn preloadable(library: PathBuf) -> Result<PathBuf, String> {
    if library.as_os_str().as_bytes().iter().any(|byte| b": ".contains(byte)) {
        let path = library.display();
        return Err(format!(
            "{path}: the loader preloads no library whose path has a blank or a colon; \
             {LIBRARY_VARIABLE} names a copy in another place"
        ));
    }
    Ok(library)
}

/// Cache directories of the user, the best first: that of `XDG_CACHE_HOME`, of `HOME`, and of the user's entry in the
/// password file, for a process without variables.
fn caches() -> Vec<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let home = User::from_uid(geteuid()).ok().flatten().map(|user| user.dir);
    let homes = [named("HOME"), home].into_iter().flatten().map(|home| home.join(".cache"));
    // A relative path is to be ignored, by the specification of the variable.
    named("XDG_CACHE_HOME").into_iter().chain(homes).filter(|path| path.is_absolute()).collect()
}

/// Writes the library to the first of the directories that will do, if it is not there already.
fn unpack(embedded: &Embedded, caches: &[PathBuf]) -> Result<PathBuf, String> {
    let mut refusals = Vec::new();
    for cache in caches {
        let place = own_directory(cache).and_then(|dir| preloadable(dir.join(embedded.name)));
        match place.and_then(|path| write_once(embedded.bytes, &path).map(|()| path)) {
            Ok(path) => return Ok(path),
            Err(refusal) if refusals.contains(&refusal) => {}
            Err(refusal) => refusals.push(refusal),
        }
    }
    Err(format!(
        "no cache directory for {LIBRARY}: {}; XDG_CACHE_HOME names another one, {LIBRARY_VARIABLE} the library",
        refusals.join("; ")
    ))
}

/// Makes the directory `farheap` in a cache, and returns its path without links, on which nobody else can write.
fn own_directory(cache: &Path) -> Result<PathBuf, String> {
    let dir = cache.join("farheap");
    let refuse = |error: io::Error| format!("{}: {error}", dir.display());
    // The home is not made: as root that would be possible anywhere.
    for part in [cache, &dir] {
        match DirBuilder::new().mode(0o755).create(part) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(refuse(error)),
            _ => {}
        }
    }
    let path = dir.canonicalize().map_err(refuse)?;
    for part in path.ancestors() {
        let data = fs::symlink_metadata(part).map_err(refuse)?;
        let (owner, mode) = (Uid::from_raw(data.uid()), data.mode());
        let is_last = part == path;
        let is_trusted = owner == geteuid() || (owner.is_root() && !is_last);
        if !is_trusted {
            return Err(format!("{} belongs to another user", part.display()));
        }
        if mode & OTHERS_WRITE != 0 && (is_last || mode & STICKY == 0) {
            return Err(format!("{} is writable by other users", part.display()));
        }
    }
    Ok(path)
}

/// Writes a file, if it does not have these bytes already.
fn write_once(bytes: &[u8], path: &Path) -> Result<(), String> {
    let refuse = |error: io::Error| format!("{}: {error}", path.display());
    if !holds(path, bytes) {
        // Under another name first: who runs a program now sees a whole file, and a link is replaced, not followed.
        let mut name = path.file_name().unwrap_or(OsStr::new(LIBRARY)).to_owned();
        name.push(format!(".{}", std::process::id()));
        let new = path.with_file_name(name);
        let _ = fs::remove_file(&new); // Of a process that was killed and had the same number.
        let written = write_new(&new, bytes).and_then(|()| fs::rename(&new, path));
        if let Err(error) = written {
            let _ = fs::remove_file(&new);
            return Err(refuse(error));
        }
    }
    let file = File::open(path).map_err(refuse)?;
    let flags = fstatvfs(&file).map_err(|errno| refuse(errno.into()))?.flags();
    if flags.contains(FsFlags::ST_NOEXEC) {
        // The loader would say so, and run the program on its own memory.
        return Err(format!("{} is on a file system without execution", path.display()));
    }
    Ok(())
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    // Children under another user read it too, where the directories let them.
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

/// True if a path is a regular file of this user's, which nobody else may write, with these bytes.
fn holds(path: &Path, bytes: &[u8]) -> bool {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let Ok(mut file) = opened else { return false };
    let is_own = file.metadata().is_ok_and(|data| {
        let is_len = data.len() == bytes.len() as u64;
        let mode = data.mode();
        data.is_file() && is_len && data.uid() == geteuid().as_raw() && mode & OTHERS_WRITE == 0
    });
    let mut found = Vec::new();
    is_own && file.read_to_end(&mut found).is_ok() && found == bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const LIBRARY_BYTES: Embedded = Embedded { name: "lib-1.so", bytes: b"bytes of a library" };

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("own directory");
    }

    #[test]
    fn the_embedded_library_is_written_once_for_its_user_alone() {
        let home = tempfile::tempdir().expect("a directory");
        let cache = [home.path().join(".cache")];
        let path = unpack(&LIBRARY_BYTES, &cache).expect("a place");
        assert_eq!(fs::read(&path).expect("a file"), LIBRARY_BYTES.bytes);
        let written = fs::metadata(&path).expect("a file");
        assert_eq!(written.mode() & 0o777, 0o644);
        assert_eq!(unpack(&LIBRARY_BYTES, &cache), Ok(path.clone()));
        assert_eq!(fs::metadata(&path).expect("a file").ino(), written.ino());
    }

    #[test]
    fn what_lies_in_the_library_s_place_is_replaced_if_it_is_anything_else() {
        let home = tempfile::tempdir().expect("a directory");
        let cache = [home.path().join(".cache")];
        let path = unpack(&LIBRARY_BYTES, &cache).expect("a place");
        let elsewhere = home.path().join("elsewhere");
        let others: [(&str, &dyn Fn()); 4] = [
            ("other bytes", &|| fs::write(&path, b"bytes of a LIBRARY").expect("own file")),
            ("fewer bytes", &|| fs::write(&path, b"bytes").expect("own file")),
            ("a file that others may write", &|| set_mode(&path, 0o666)),
            ("a link", &|| {
                fs::rename(&path, &elsewhere).expect("own file");
                symlink(&elsewhere, &path).expect("a link");
            }),
        ];
        for (what, put) in others {
            put();
            assert_eq!(unpack(&LIBRARY_BYTES, &cache), Ok(path.clone()), "{what}");
            let data = fs::symlink_metadata(&path).expect("a file");
            assert!(data.is_file() && data.mode() & 0o777 == 0o644, "{what}");
            assert_eq!(fs::read(&path).expect("a file"), LIBRARY_BYTES.bytes, "{what}");
        }
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused_and_the_next_one_taken() {
        let home = tempfile::tempdir().expect("a directory");
        let (open, closed) = (home.path().join("open"), home.path().join("closed"));
        fs::create_dir(&open).expect("a directory");
        set_mode(&open, 0o777);
        for cache in [open.clone(), open.join("below")] {
            let refusal = unpack(&LIBRARY_BYTES, &[cache]).expect_err("open");
            assert!(refusal.contains("open is writable by other users"), "{refusal}");
        }
        let path = unpack(&LIBRARY_BYTES, &[open.clone(), closed.clone()]).expect("the second");
        assert!(path.ends_with("closed/farheap/lib-1.so"), "{}", path.display());
        // Its own directory that was opened since.
        set_mode(&closed.join("farheap"), 0o1777);
        let refusal = unpack(&LIBRARY_BYTES, &[closed]).expect_err("open by now");
        assert!(refusal.contains("farheap is writable by other users"), "{refusal}");
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        if !geteuid().is_root() {
            println!("skipped: only root gives directories away");
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let cache = home.path().join("cache");
        fs::create_dir_all(cache.join("farheap")).expect("a directory");
        std::os::unix::fs::chown(cache.join("farheap"), Some(65534), None).expect("as root");
        let refusal = unpack(&LIBRARY_BYTES, &[cache]).expect_err("of another user");
        assert!(refusal.contains("farheap belongs to another user"), "{refusal}");
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        let home = tempfile::tempdir().expect("a directory");
        let refusal = unpack(&LIBRARY_BYTES, &[home.path().join("a b")]).expect_err("a blank");
        assert!(refusal.contains("a blank or a colon"), "{refusal}");
    }
}
