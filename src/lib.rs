// README's links to pages of the book, for its reader here: the first definition of a link counts.
#![doc = include_str!("../book/links.md")]
#![doc = include_str!("../README.md")]
#![cfg_attr(all(feature = "nightly", not(std_allocator)), feature(allocator_api))]
// Under loom there is only what its models run; the rest needs a kernel.
#![cfg_attr(loom, allow(unfulfilled_lint_expectations, reason = "some unsafe code is left out"))]
#![cfg_attr(loom, allow(dead_code, reason = "most users of these modules are left out"))]
// README and pages of this crate link to what features build; CI documents all of them.
#![cfg_attr(
    not(all(feature = "heap", feature = "pool", feature = "encrypt")),
    allow(rustdoc::broken_intra_doc_links, reason = "some links lead to what is left out")
)]
// Some of what the lower layers can do has one user.
#![cfg_attr(
    not(all(feature = "heap", feature = "pool")),
    allow(dead_code, reason = "a user of these modules is left out")
)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "farheap needs 64-bit Linux: it is built on userfaultfd, which other systems do not have. To \
     build a program elsewhere without far memory, name farheap under \
     [target.'cfg(target_os = \"linux\")'.dependencies] and put what uses it under \
     #[cfg(target_os = \"linux\")], as book/src/how_to/rust.md shows"
);

mod base;
#[cfg(not(loom))]
pub mod config;
#[cfg(all(feature = "heap", not(loom)))]
mod heap;
// The protocols of the heap's thread caches, for their models.
#[cfg(loom)]
#[path = "heap/thread_cache/biased_lock.rs"]
mod heap_biased_lock;
#[cfg(loom)]
#[path = "heap/counts.rs"]
mod heap_counts;
mod limit;
#[cfg(not(loom))]
mod meta;
mod paging;
#[cfg(all(feature = "pool", not(loom)))]
pub mod pool;
// The protocols of the pool's page words and chunks, for their models.
#[cfg(loom)]
#[path = "pool/chunk_note.rs"]
mod pool_chunk_note;
#[cfg(loom)]
#[path = "pool/latch.rs"]
mod pool_latch;
#[cfg(all(feature = "heap", not(loom)))]
mod runtime;
#[cfg(not(loom))]
pub mod store;
#[cfg(not(loom))]
mod sys;

// The pages of the book, so that they are where the crate is, and their programs are compiled.
#[cfg(doc)]
pub mod book {
    #![doc = include_str!("../book/links.md")]
    #![doc = include_str!("../book/src/introduction.md")]
    #[allow(unused_imports, reason = "the pages link to items by their names")]
    use super::*;
    macro_rules! pages {
        ($($part:literal $($name:ident)*;)*) => { $($(
            #[doc = include_str!("../book/links.md")]
            #[doc = include_str!(concat!("../book/src/", $part, "/", stringify!($name), ".md"))]
            pub mod $name {}
        )*)* };
    }
    pages! {
        "guide" first_heap choosing top;
        "how_to" rust engine cpp install run containers network moving;
        "reference" options statistics errors limits runtimes guarantees c_interface;
        "design" architecture decisions faults write_back eviction memory pool fork placement;
        "measurements" programs fault_rates policies allocations pool_rates cooperative objects placements papers;
        "." tried;
    }
}

/// The version of `allocator-api2` (0.2) whose `Allocator` the handles [`Far`] and [`Local`]
/// implement, as hashbrown and bumpalo do: its `Vec`, `Box` and traits by this path agree with them
/// whatever version a program has itself.
#[cfg(not(loom))]
pub use allocator_api2;
pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageId};
#[cfg(all(feature = "heap", not(loom)))]
pub use heap::{Far, FarHeap, Local, Scope, Tier, Usage};
// For the interface for C, which is a crate of its own.
#[cfg(all(feature = "heap", not(loom)))]
#[doc(hidden)]
pub use heap::c_malloc as malloc;
#[cfg(not(loom))]
pub use limit::manager;
#[cfg(not(loom))]
#[doc(no_inline)]
pub use limit::manager::MemoryManager;
#[cfg(not(loom))]
pub use paging::region;
#[cfg(not(loom))]
#[doc(no_inline)]
pub use paging::region::Stats;
#[cfg(all(feature = "heap", not(loom)))]
pub use runtime::Heap;
// For the library of `farheap run`, which is a crate of its own.
#[cfg(not(loom))]
#[doc(hidden)]
pub mod host {
    #[cfg(feature = "heap")]
    pub use crate::runtime::let_code_leave_by;
    pub use crate::sys::fork::Private;
    pub use crate::sys::pagemap::Pagemap;
    pub use crate::sys::uffd::Uffd;
}
// That one prints by `messages`; the command asks the machine by `probe`.
#[cfg(not(loom))]
#[doc(hidden)]
pub use sys::{messages, probe};
