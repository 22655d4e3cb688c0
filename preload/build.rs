//! Links the library so that it learns of the threads that its own code starts, and so that memory which
//! its own code maps never is far.

fn main() {
    // `own::start_thread` takes the place of pthread_create for this library; `own::pthread_create` for the program.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap=pthread_create");
    // `mapping`, `advice` and `descriptors` export what the program calls; this library, jemalloc in it, calls
    // the kernel.
    for name in ["mmap", "mmap64", "munmap", "mremap", "mprotect", "madvise", "close"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
