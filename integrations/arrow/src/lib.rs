//! [Arrow]'s buffers in far memory of [farheap].
//!
//! Arrays in far memory are arrays like others: kernels read them, slices share them, and cold pages come back from the
//! tier's device when they are touched. [`BufferWriter`] writes a buffer there, [`buffer_of_vec`] takes a vector that is
//! there, [`copy_batches`], [`copy_array`] and [`copy_buffer`] copy what exists, and copy it back with
//! [`Tier::LOCAL`](farheap::Tier::LOCAL).
//!
//! # Limits
//! 1. Memory is freed when the last array, or slice of one, that uses its buffer is dropped.
//!    [`Heap::shutdown`](farheap::Heap::shutdown) fails while there is one.
//! 2. What a kernel computes is where the program's allocator puts it. With [`FarHeap`](farheap::FarHeap) as the global
//!    allocator, large results are far as well, and these functions are for what has to be far, or local, by decision.
//! 3. A slice is copied alone, but of views, dictionaries, runs and dense unions all the values that they point into.
//! 4. A buffer of far memory cannot be made mutable again: `into_mutable` returns it as it is.
//! 5. System calls, such as a write of a buffer to a file, fail with `EFAULT` on pages that are not resident, unless the
//!    heap [serves the kernel's faults](farheap::region::Region::serves_kernel_faults).
//!
//! [Arrow]: https://docs.rs/arrow
//! [farheap]: https://docs.rs/farheap

/// Its program is compiled as those of this page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod copies;
mod memory;

pub use copies::{copy_array, copy_batches, copy_buffer};
pub use memory::{BufferWriter, buffer_of_vec};
