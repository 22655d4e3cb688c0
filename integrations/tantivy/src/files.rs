//! Files by name, who writes and who watches them.
//!
//! # Invariants
//! 1. A name is free, claimed by one writer, or has a file; each changes under the lock.
//! 2. A file's bytes never change: a file that is written again is another one under the same name.
//! 3. Memory is freed without the lock: that may wait for the allocator.

use farheap::ByteCount;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tantivy::directory::error::{DeleteError, OpenReadError, OpenWriteError};
use tantivy::directory::{OwnedBytes, WatchCallback, WatchCallbackList, WatchHandle};

/// How a file was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Once, through a writer.
    Written,
    /// At once, and perhaps again.
    Replaced,
}

/// A file.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) bytes: OwnedBytes,
    pub(crate) kind: Kind,
}

#[derive(Default)]
struct Names {
    files: HashMap<PathBuf, File>,
    claimed: HashSet<PathBuf>,
}

/// The files of a directory.
#[derive(Default)]
pub(crate) struct Files {
    names: RwLock<Names>,
    watchers: WatchCallbackList,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = self.read().files.len();
        f.debug_struct("Files").field("files", &files).finish_non_exhaustive()
    }
}

impl Files {
    // A panic leaves the names as they were: each change is one insertion or removal.
    fn read(&self) -> RwLockReadGuard<'_, Names> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Names> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bytes(&self) -> ByteCount {
        self.read().files.values().map(|file| ByteCount(file.bytes.len() as u64)).sum()
    }

    /// All files as they are at one moment: an index in which no commit is half done.
    pub(crate) fn all(&self) -> Vec<(PathBuf, File)> {
        let names = self.read();
        names.files.iter().map(|(path, file)| (path.clone(), file.clone())).collect()
    }

    pub(crate) fn open(&self, path: &Path) -> Result<OwnedBytes, OpenReadError> {
        let names = self.read();
        let file = names.files.get(path);
        Ok(file.ok_or_else(|| OpenReadError::FileDoesNotExist(path.to_owned()))?.bytes.clone())
    }

    /// True for a file that is being written, too.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        let names = self.read();
        names.files.contains_key(path) || names.claimed.contains(path)
    }

    /// Takes a name for a writer.
    pub(crate) fn claim(&self, path: &Path) -> Result<(), OpenWriteError> {
        let mut names = self.write();
        if names.files.contains_key(path) || !names.claimed.insert(path.to_owned()) {
            return Err(OpenWriteError::FileAlreadyExists(path.to_owned()));
        }
        Ok(())
    }

    /// Frees the name of a writer that has written nothing.
    pub(crate) fn give_up(&self, path: &Path) {
        self.write().claimed.remove(path);
    }

    /// Gives a name its file.
    pub(crate) fn put(&self, path: &Path, bytes: OwnedBytes, kind: Kind) {
        let mut names = self.write();
        names.claimed.remove(path);
        let before = names.files.insert(path.to_owned(), File { bytes, kind });
        drop(names);
        drop(before);
    }

    pub(crate) fn delete(&self, path: &Path) -> Result<(), DeleteError> {
        let file = self.write().files.remove(path);
        file.map(drop).ok_or_else(|| DeleteError::FileDoesNotExist(path.to_owned()))
    }

    pub(crate) fn watch(&self, callback: WatchCallback) -> WatchHandle {
        self.watchers.subscribe(callback)
    }

    /// Calls those who watch, in a thread that nobody waits for.
    pub(crate) fn broadcast(&self) {
        drop(self.watchers.broadcast());
    }
}
