//! The buffer pool: pages of a table file at fixed addresses.
//!
//! A page's address is the pool's base plus its number times the page size, so that a hit is one
//! look at the page's word and no translation (the idea of vmcache). [`BufferPool::fix_shared`]
//! and its kin return guards; what is not resident is read from the table file, and the memory
//! manager makes room. Sibling of `paging`: uses `store`, `meta`, `limit`.
//!
//! Every page ends in a trailer of 16 bytes that belongs to the pool: the number of the
//! log record that changed the page last, and a checksum. [`PoolConfig::whole_pages`] leaves it out.
//!
//! From the ground up, each file uses only those before it:
//!
//! | files | hold |
//! |---|---|
//! | `latch`, `backoff`, `stats` | the word of one page; waiting for it; figures |
//! | `page_table`, `chunk` (of `chunk_note`s), `resident` (with `replacement`), `account`, `free_list` | the parts: words and memory, notes of 512 pages, what is in memory, the share of the limit, free numbers |
//! | `frames` | the parts together: memory is charged, split, dropped |
//! | `file`, `checksum` | the store and its queues |
//! | `allocate`, `free_chain`, `header`, `load`, `write_back` | what happens to pages |
//! | `coalescing`, `evict`, `donate`, `huge`, `cleaner`, `worker`, `group` | what makes room, on demand and ahead; in all tables of one pool |
//! | `guard`, `config`, `buffer_pool`, `fix`, `redo`, `batch` | what a user of the pool sees |
//!
//! # Invariants
//! 1. A page's memory is changed, read in or dropped only by the holder of its latch in state `Locked`,
//!    and written to the file only under the latch; see `latch`.
//! 2. The pool does no I/O for a page that is resident and clean.
//! 3. Statistics are copied from the parts and decide nothing: where a quantity decides, it is state of
//!    the part that uses it.

mod account;
mod allocate;
mod backoff;
mod batch;
mod buffer_pool;
mod checksum;
mod chunk;
mod chunk_note;
mod cleaner;
mod coalescing;
mod config;
mod donate;
mod evict;
mod file;
mod fix;
mod frames;
mod free_chain;
mod free_list;
mod group;
mod guard;
mod header;
mod huge;
mod latch;
mod load;
mod page_table;
mod redo;
mod replacement;
mod resident;
mod stats;
mod worker;
mod write_back;
mod write_result;

pub use buffer_pool::BufferPool;
pub use config::PoolConfig;
pub use guard::{ExclusiveGuard, OptimisticGuard, PageVersion, SharedGuard};
pub use replacement::{Clock, Proven, Replacement, Worth};
pub use stats::PoolStats;
