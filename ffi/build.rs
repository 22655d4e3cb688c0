//! Gives the shared library its soname: the number is that of the ABI, `FARHEAP_ABI_VERSION`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfarheap.so.1");
}
