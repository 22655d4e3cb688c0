//! Copies of an index from and to other directories.

use crate::files::Kind;
use crate::{FarDirectory, META};
use farheap::Heap;
use std::io::Write;
use std::path::Path;
use tantivy::directory::error::OpenWriteError;
use tantivy::directory::{Directory, INDEX_WRITER_LOCK, ManagedDirectory, TerminatingWrite};

/// The list of files that tantivy keeps.
const MANAGED: &str = ".managed.json";
/// Bytes that are passed on at once. A writer may pass them to a system call, which fails on far memory that is not
/// resident where the kernel's faults are not served: they are copied to the stack first.
const STEP: usize = 8 << 10;

impl FarDirectory {
    /// Copies an index from another directory, such as tantivy's `MmapDirectory`, into far memory. Holds that
    /// directory's lock for writers meanwhile.
    ///
    /// # Errors
    /// [`LockFailure`](tantivy::TantivyError::LockFailure) while somebody writes there; those of that directory;
    /// [`OutOfMemory`](std::io::ErrorKind::OutOfMemory) where the tier has no room.
    pub fn load(tier: &Heap, from: &dyn Directory) -> tantivy::Result<FarDirectory> {
        let lock = from.acquire_lock(&INDEX_WRITER_LOCK);
        let _lock = lock.map_err(|error| tantivy::TantivyError::LockFailure(error, None))?;
        let directory = FarDirectory::new(tier);
        for path in ManagedDirectory::wrap(from.box_clone())?.list_managed_files() {
            // The list has files that are about to be written, or were deleted.
            if path == Path::new(META) || !from.exists(&path)? {
                continue;
            }
            let bytes = from.open_read(&path)?.read_bytes()?;
            directory.files.put(&path, directory.copy_of(&bytes)?, Kind::Written);
        }
        for name in [MANAGED, META] {
            let path = Path::new(name);
            if from.exists(path)? {
                directory.atomic_write(path, &from.atomic_read(path)?)?;
            }
        }
        Ok(directory)
    }

    /// Copies the index, as it is at one moment, to another directory. That should be empty: `meta.json`, which makes it
    /// an index, is written last, when all other files are durable.
    ///
    /// # Errors
    /// [`FileAlreadyExists`](OpenWriteError::FileAlreadyExists) where a file of that name is there; those of the other
    /// directory.
    pub fn persist(&self, to: &dyn Directory) -> tantivy::Result<()> {
        let (replaced, written): (Vec<_>, Vec<_>) =
            self.files.all().into_iter().partition(|(_, file)| file.kind == Kind::Replaced);
        let meta = Path::new(META);
        if to.exists(meta)? {
            return Err(OpenWriteError::FileAlreadyExists(meta.to_owned()).into());
        }
        // A name that begins with a dot is that of a lock.
        let is_lock = |path: &Path| path.to_string_lossy().starts_with('.');
        for (path, file) in written.iter().filter(|(path, _)| !is_lock(path)) {
            let mut writer = to.open_write(path)?;
            let mut local = [0; STEP];
            for part in file.bytes.chunks(STEP) {
                let local = &mut local[..part.len()];
                local.copy_from_slice(part);
                writer.write_all(local)?;
            }
            writer.terminate()?;
        }
        to.sync_directory()?;
        let (last, first): (Vec<_>, Vec<_>) = replaced.iter().partition(|(path, _)| path == meta);
        for (path, file) in first.into_iter().chain(last) {
            to.atomic_write(path, &file.bytes)?;
        }
        to.sync_directory()?;
        Ok(())
    }
}
