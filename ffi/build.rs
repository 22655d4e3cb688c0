//! Gives the shared library its soname: the number is that of the ABI, `FARHEAP_ABI_VERSION`. It
//! stays loaded when a host closes it: it has threads, a signal handler and thread-local data.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfarheap.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Symbols that the parts of this library need of each other, as jemalloc does `_rjem_malloc_conf`, are
    // its own: a host with a jemalloc of the same prefix would take them for its own.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
