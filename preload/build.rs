//! Links the library so that it learns of the threads that its own code starts.

fn main() {
    // `own::start_thread` takes the place of pthread_create for this library, not for the program.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap=pthread_create");
    println!("cargo::rerun-if-changed=build.rs");
}
