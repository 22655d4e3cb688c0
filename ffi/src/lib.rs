//! farheap for C and C++.
//!
//! The C interface is declared and documented in `include/farheap.h`; `tests/header.rs` checks that
//! both sides agree. Each function checks its pointers, calls the public interface of `farheap`,
//! and turns errors and panics into a [`status`](error::farheap_status) with a message. A long
//! explanation is in `book/src/reference/c_interface.md`.
//!
//! Top down: `heap` (start, stop, hints, statistics), `memory` (`far_malloc` and kin), `scope`,
//! `collective`, `manager`, `account`, `pool`, `page` (guards), `btree`, `stats`, `config`, `abi`
//! (version, features); below them `handle` (what an opaque pointer is) and `error`; `log` tells the host what the library says.
//!
//! # Invariants
//! 1. No panic leaves a function: each one runs inside [`error::call`] or does nothing that can
//!    panic.
//! 2. Out-parameters are written only on success.
//! 3. An opaque pointer is never followed: `handle` looks it up.
#![allow(non_camel_case_types, reason = "types have the names that C gives them")]
#![allow(clippy::missing_safety_doc, reason = "farheap.h says what the caller of each promises")]
#![allow(missing_docs, reason = "farheap.h documents each function and type")]

pub mod abi;
pub mod account;
pub mod btree;
pub mod bump;
pub mod collective;
pub mod config;
pub mod error;
mod handle;
pub mod heap;
pub mod log;
pub mod manager;
pub mod memory;
pub mod page;
pub mod pool;
pub mod scope;
pub mod stats;
