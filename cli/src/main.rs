//! `farheap`: command-line companion of the crate.

fn main() {
    println!("farheap {}", env!("CARGO_PKG_VERSION"));
}
