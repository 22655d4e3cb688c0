//! A region with the pattern on its store.

use crate::os::Words;
use crate::process::check_interrupt;
use crate::{Failure, Result};
use farheap::ByteCount;
use farheap::region::{Region, RegionConfig};
use farheap::store::{BlockStore, MemStore, Store};
use std::path::Path;
use std::sync::Arc;

/// Far memory and the words in it.
pub(crate) struct Far {
    pub(crate) region: Region,
    pub(crate) words: Words,
}

/// Words written between two looks for an interrupt.
const INTERRUPT_WORDS: usize = 1 << 17;

/// Bytes of store for `data`: dirty pages get fresh slots before their old ones are free.
fn store_bytes(data: usize) -> usize {
    data + data / 8 + (64 << 20)
}

pub(crate) fn memory_store(data: usize) -> Result<Arc<dyn Store>> {
    let store = MemStore::new(ByteCount(store_bytes(data) as u64)).map_err(Failure::of)?;
    Ok(Arc::new(store))
}

pub(crate) fn file_store(dir: &Path, data: usize) -> Result<Arc<dyn Store>> {
    let capacity = ByteCount(store_bytes(data) as u64);
    let store = BlockStore::temporary(Some(dir), Some(capacity)).map_err(Failure::of)?;
    Ok(Arc::new(store))
}

pub(crate) fn device_store(path: &Path) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(BlockStore::open(path, None).map_err(Failure::of)?))
}

/// Bytes of a loop device that serves as store.
pub(crate) fn device_bytes(data: usize) -> usize {
    store_bytes(data)
}

/// Settings of a region for `data` bytes in `cache` bytes of memory.
pub(crate) fn config(cache: usize, data: usize) -> RegionConfig {
    RegionConfig::new().limit(ByteCount(cache as u64)).span(ByteCount(data as u64 + (64 << 20)))
}

impl Far {
    /// Maps `data` bytes that have never been touched.
    pub(crate) fn fresh(config: RegionConfig, store: Arc<dyn Store>, data: usize) -> Result<Far> {
        let region = Region::create(config, store).map_err(Failure::of)?;
        let ptr = region.map(ByteCount(data as u64)).map_err(Failure::of)?.cast::<u8>();
        Ok(Far { words: range(&region, ptr.as_ptr(), data), region })
    }

    /// Maps `data` bytes with the pattern, all of it on the store and nothing resident.
    pub(crate) fn stored(config: RegionConfig, store: Arc<dyn Store>, data: usize) -> Result<Far> {
        let far = Far::fresh(config, store, data)?;
        for index in 0..far.words.len() {
            if index.is_multiple_of(INTERRUPT_WORDS) {
                check_interrupt()?;
            }
            far.words.write(index, index as u64);
        }
        far.region.evict_all().map_err(Failure::of)?;
        Ok(far)
    }
}

/// The words of a range of a region; the region must outlive them, which [`Far`] sees to.
pub(crate) fn range(region: &Region, ptr: *mut u8, len: usize) -> Words {
    assert!(region.contains(ptr) && region.contains(ptr.wrapping_add(len - 1)));
    Words::of_region(ptr, len)
}
