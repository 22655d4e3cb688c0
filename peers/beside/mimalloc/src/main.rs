//! The buffer pool in a program with another global allocator. No jemalloc is built for it.

use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use farheap_collections::pool::BTree;
use std::error::Error;

#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), Box<dyn Error>> {
    let manager = MemoryManager::start(ByteCount::mib(16))?;
    let path = std::env::temp_dir().join(format!("farheap-beside-{}", std::process::id()));
    let pool = PoolConfig::new().create(&path, ByteCount::mib(64), &manager)?;
    let tree = BTree::create(&pool)?;
    for key in 0..50_000_u64 {
        tree.insert(&key.to_be_bytes(), &[key as u8; 400])?; // More than the limit holds.
    }
    for key in 0..50_000_u64 {
        let value = tree.get(&key.to_be_bytes())?;
        assert!(value.is_some_and(|value| value[..] == [key as u8; 400]), "{key}");
    }
    pool.flush()?;
    std::fs::remove_file(path)?;
    println!("ok: {}", env!("CARGO_PKG_DESCRIPTION"));
    Ok(())
}
