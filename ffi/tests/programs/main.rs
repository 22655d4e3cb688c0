//! Programs in C and C++ that use the library as its hosts do.

mod c;
#[path = "../common/mod.rs"]
mod common;
mod cpp;
