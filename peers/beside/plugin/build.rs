//! Keeps the plug-in where it is when a host closes it, as book/src/how_to/install.md demands: jemalloc and farheap have
//! destructors for the threads that have used them.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
