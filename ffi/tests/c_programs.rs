//! C programs that use the library as its hosts do.

mod common;

use common::{C, crate_dir, installed, run_program, sources_are_readable};

/// AddressSanitizer sees the program's own memory; far memory is the library's to watch.
const ASAN: &[&str] = &["-fsanitize=address", "-fno-omit-frame-pointer"];

fn test(name: &str) {
    if !sources_are_readable() {
        return;
    }
    let source = crate_dir().join("tests/c").join(name);
    for compiler in installed(C) {
        for options in [&[][..], ASAN] {
            let dir = tempfile::tempdir().expect("a directory");
            let program = dir.path().join("program");
            compiler.program(&source, &program, options);
            println!("{} {name} {options:?}", compiler.name);
            run_program(&program);
        }
    }
}

#[test]
fn heap() {
    test("heap.c");
}

#[test]
fn pool() {
    test("pool.c");
}

#[test]
fn collective() {
    test("collective.c");
}

#[test]
fn misuse() {
    test("misuse.c");
}
