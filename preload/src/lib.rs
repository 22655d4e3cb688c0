//! `libfarheap_preload.so`: the malloc family on farheap, for programs that nobody recompiles.
//!
//! `farheap run` has it preloaded (`LD_PRELOAD`). Top down: [`entry`] exports what programs call, [`extended`]
//! what those call that are linked to another allocator,
//! [`mapping`] what those call that map memory past malloc, [`advice`] what drops memory ([`code`] what the library drops itself), [`descriptors`] what
//! closes descriptors, [`loading`] what loads libraries, [`exec`] what starts programs, some without this library
//! ([`elf`], which the command has, too);
//! [`start`] starts the far heap once the program has some memory in use; [`report`] prints the
//! statistics at the end; [`environment`] is what a program is started with. What the C library, its loader and this
//! library's own threads allocate comes from [`inner`], told apart by [`own`]. Uses farheap's public interface only. Built for
//! x86-64 with the GNU C library; elsewhere the library is empty.
//!
//! # Invariants
//! 1. No thread of farheap's touches far memory: what it allocates, by Rust or by C, is local.
//! 2. What allocates inside of an allocation gets memory from `inner`, which uses no thread-local
//!    variable of a dynamic kind: the loader may allocate when one is first used.
//! 3. Only blocks of `inner` lie in its range, so that an address says how it is freed.

#![cfg(all(target_arch = "x86_64", target_env = "gnu"))]

mod advice;
mod code;
mod descriptors;
mod elf;
mod entry;
mod environment;
mod exec;
mod extended;
mod inner;
mod loading;
mod mapping;
mod own;
mod report;
mod start;
