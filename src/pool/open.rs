//! Creating and opening the table of a pool.

use super::buffer_pool::BufferPool;
use super::config::PoolConfig;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::limit::manager::MemoryManager;
use crate::store::{BlockStore, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl PoolConfig {
    /// Creates a table file, or takes a raw block device, of at most `capacity` bytes at `path`.
    /// What exists there has to be free, as [`BlockStore::create`] says, unless
    /// [`overwrite`](PoolConfig::overwrite) allows it to be lost. A file becomes its owner's only.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the path cannot be used, or with the data that it holds;
    /// [`Error::Config`](crate::Error::Config) for a bad page size.
    pub fn create(
        self,
        path: impl AsRef<Path>,
        capacity: ByteCount,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        let path = path.as_ref();
        self.check()?; // Before anything is overwritten.
        let store = BlockStore::create(path, Some(capacity), self.overwrite)?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, true)
    }

    /// Opens an existing table file or device.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) naming what is wrong: missing, read-only, no table file, shorter than
    /// its header says, or created with another page size.
    pub fn open(
        self,
        path: impl AsRef<Path>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        let path = path.as_ref();
        let store = BlockStore::open(path, None)?;
        BufferPool::start(self, path.to_path_buf(), Arc::new(store), manager, false)
    }

    /// Creates a table on a store; what that holds is lost.
    ///
    /// # Errors
    /// As for [`PoolConfig::create`].
    pub fn create_on(
        self,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        BufferPool::start(self, PathBuf::from("(store)"), store, manager, true)
    }

    /// Opens the table on a store.
    ///
    /// # Errors
    /// As for [`PoolConfig::open`].
    pub fn open_on(
        self,
        store: Arc<dyn Store>,
        manager: &Arc<MemoryManager>,
    ) -> Result<Arc<BufferPool>> {
        let _ours = keep_local();
        BufferPool::start(self, PathBuf::from("(store)"), store, manager, false)
    }
}
