//! A directory of [tantivy] in far memory of [farheap]: an index larger than memory, under a limit.
//!
//! tantivy reads its files as slices of bytes. In a [`FarDirectory`] these are slices of far memory: cold pages are on
//! the tier's device and come back when a query touches them. Nothing is copied to be read, and all readers share the
//! same pages. The tier's limit bounds what is resident, beside whatever else is far in the process.
//!
//! A file is written in blocks, and becomes one piece of far memory of its size when it is terminated. A file that is
//! deleted gives its memory, and its space on the device, back as soon as the last reader of it is gone.
//!
//! # Durability
//! Far memory ends with its process. [`FarDirectory::persist`] copies an index to another directory, such as one of
//! files, and [`FarDirectory::load`] copies it from there.
//!
//! # Errors
//! A write for which the tier has no memory fails with [`io::ErrorKind::OutOfMemory`]; tantivy then refuses the commit or
//! the merge. What was committed stays, and can be searched.
//!
//! # Limits
//! 1. While a file is terminated it needs its size twice in the tier, less what has been moved.
//! 2. The indexing threads' own memory, which `Index::writer` bounds, is the program's. With
//!    [`FarHeap`](farheap::FarHeap) as the global allocator it is under the process's limit.
//! 3. [`Heap::shutdown`] fails while the directory, or a searcher, holds a file.
//! 4. `meta.json` and `.managed.json`, which tantivy reads and replaces all the time, are the program's memory.
//!
//! # Examples
//! ```
//! use farheap::Heap;
//! use farheap_tantivy::FarDirectory;
//! use tantivy::collector::Count;
//! use tantivy::query::QueryParser;
//! use tantivy::schema::{Schema, TEXT};
//! use tantivy::{Index, IndexSettings, doc};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let heap = match Heap::builder().parse("far_limit:16MiB,capacity:1GiB")?.start() {
//!     Ok(heap) => heap,
//!     Err(error) => {
//!         println!("{error}"); // Says how to allow userfaultfd.
//!         return Ok(());
//!     }
//! };
//! let mut schema = Schema::builder();
//! let body = schema.add_text_field("body", TEXT);
//! let directory = FarDirectory::new(&heap);
//! let index = Index::create(directory, schema.build(), IndexSettings::default())?;
//! let mut writer = index.writer(16 << 20)?;
//! writer.add_document(doc!(body => "cold pages live on a block device"))?;
//! writer.commit()?;
//! let query = QueryParser::for_index(&index, vec![body]).parse_query("pages")?;
//! assert_eq!(index.reader()?.searcher().search(&query, &Count)?, 1);
//! # Ok(())
//! # }
//! ```
//!
//! [farheap]: https://docs.rs/farheap
//! [tantivy]: https://docs.rs/tantivy

/// Its program is compiled as those of this page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod copies;
mod files;
mod memory;

use farheap::{ByteCount, Heap};
use files::{Files, Kind};
use memory::FarBytes;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tantivy::directory::error::{DeleteError, OpenReadError, OpenWriteError};
use tantivy::directory::{
    AntiCallToken, Directory, FileHandle, OwnedBytes, TerminatingWrite, WatchCallback, WatchHandle,
    WritePtr,
};

/// The file whose replacement is a commit.
const META: &str = "meta.json";

/// The files of a tantivy index in far memory. Clones are the same directory.
#[derive(Clone, Debug)]
pub struct FarDirectory {
    tier: Heap,
    files: Arc<Files>,
}

impl FarDirectory {
    /// Makes an empty directory in a heap, or in one of its further [tiers](Heap::add_tier).
    #[must_use]
    pub fn new(tier: &Heap) -> FarDirectory {
        FarDirectory { tier: tier.clone(), files: Arc::default() }
    }

    /// Returns the sum of the files' lengths. Files that are being written are not in it, nor those that were deleted
    /// and still have readers.
    #[must_use]
    pub fn file_bytes(&self) -> ByteCount {
        self.files.bytes()
    }

    fn copy_of(&self, data: &[u8]) -> io::Result<OwnedBytes> {
        let mut bytes = FarBytes::with_capacity(&self.tier, data.len())?;
        bytes.push(data);
        Ok(OwnedBytes::new(bytes))
    }
}

impl Directory for FarDirectory {
    fn get_file_handle(&self, path: &Path) -> Result<Arc<dyn FileHandle>, OpenReadError> {
        Ok(Arc::new(self.files.open(path)?))
    }

    fn delete(&self, path: &Path) -> Result<(), DeleteError> {
        self.files.delete(path)
    }

    fn exists(&self, path: &Path) -> Result<bool, OpenReadError> {
        Ok(self.files.exists(path))
    }

    fn open_write(&self, path: &Path) -> Result<WritePtr, OpenWriteError> {
        self.files.claim(path)?;
        let file = FileWriter {
            directory: self.clone(),
            path: path.to_owned(),
            blocks: Vec::new(),
            len: 0,
            is_open: true,
        };
        Ok(BufWriter::new(Box::new(file)))
    }

    fn atomic_read(&self, path: &Path) -> Result<Vec<u8>, OpenReadError> {
        Ok(self.files.open(path)?.to_vec())
    }

    fn atomic_write(&self, path: &Path, data: &[u8]) -> io::Result<()> {
        self.files.put(path, OwnedBytes::new(data.to_vec()), Kind::Replaced);
        if path == Path::new(META) {
            self.files.broadcast();
        }
        Ok(())
    }

    fn sync_directory(&self) -> io::Result<()> {
        // Nothing outlives the process: there is nothing to make durable.
        Ok(())
    }

    fn watch(&self, callback: WatchCallback) -> tantivy::Result<WatchHandle> {
        Ok(self.files.watch(callback))
    }
}

/// A file while it is written.
struct FileWriter {
    directory: FarDirectory,
    path: PathBuf,
    /// All are full but the last one.
    blocks: Vec<FarBytes>,
    len: usize,
    /// Until it is terminated.
    is_open: bool,
}

impl FileWriter {
    /// A size that freed blocks of a thread are kept for: writing allocates nothing most of the time.
    const BLOCK: usize = 256 << 10;
}

impl Write for FileWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.len == Self::BLOCK * self.blocks.len() {
            self.blocks.push(FarBytes::with_capacity(&self.directory.tier, Self::BLOCK)?);
        }
        let free = Self::BLOCK * self.blocks.len() - self.len;
        let taken = data.len().min(free);
        self.blocks.last_mut().expect("one was pushed").push(&data[..taken]);
        self.len += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TerminatingWrite for FileWriter {
    fn terminate_ref(&mut self, _: AntiCallToken) -> io::Result<()> {
        let mut bytes = FarBytes::with_capacity(&self.directory.tier, self.len)?;
        // Each block is freed as soon as it is copied: the limit and the device need not hold all of it twice.
        self.blocks.drain(..).for_each(|block| bytes.push(&block));
        self.is_open = false;
        self.directory.files.put(&self.path, OwnedBytes::new(bytes), Kind::Written);
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.is_open {
            self.directory.files.give_up(&self.path);
        }
    }
}
