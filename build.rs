//! Finds out whether the compiler has a stable `std::alloc::Allocator`: `cfg(std_allocator)` then.

use autocfg::AutoCfg;

/// What `heap::handle` implements, and what programs do with it. The names and types of all methods are
/// here: a compiler that has others is one whose trait the crate does not know.
const PROBE: &str = r#"
use std::alloc::{AllocError, Allocator, Layout};
use std::ptr::NonNull;
type Block = Result<NonNull<[u8]>, AllocError>;
pub struct Handle;
unsafe impl Allocator for Handle {
    fn allocate(&self, _: Layout) -> Block { Err(AllocError) }
    fn allocate_zeroed(&self, _: Layout) -> Block { Err(AllocError) }
    unsafe fn deallocate(&self, _: NonNull<u8>, _: Layout) {}
    unsafe fn grow(&self, _: NonNull<u8>, _: Layout, _: Layout) -> Block { Err(AllocError) }
    unsafe fn grow_zeroed(&self, _: NonNull<u8>, _: Layout, _: Layout) -> Block { Err(AllocError) }
    unsafe fn shrink(&self, _: NonNull<u8>, _: Layout, _: Layout) -> Block { Err(AllocError) }
}
pub fn numbers() -> Vec<u64, Handle> { Vec::new_in(Handle) }
pub fn number() -> Box<u64, Handle> { Box::new_in(1, Handle) }
"#;

fn main() {
    autocfg::rerun_path("build.rs");
    // For build scripts of packages that build more than cargo does for them, as the command's: `DEP_FARHEAP_DIR`.
    if let Ok(dir) = std::env::var("CARGO_MANIFEST_DIR") {
        println!("cargo::metadata=dir={dir}");
    }
    autocfg::emit_possibility("std_allocator");
    match AutoCfg::new() {
        Ok(compiler) if compiler.probe_raw(PROBE).is_ok() => autocfg::emit("std_allocator"),
        Ok(_) => {}
        Err(error) => {
            println!("cargo::warning=the compiler was not asked for `Allocator`: {error}")
        }
    }
}
