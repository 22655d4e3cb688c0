//! C programs that use the library as its hosts do.

mod common;

use common::{C, crate_dir, installed, library, run, run_program, sources_are_readable, succeed};
use std::process::Command;

fn test(name: &str) {
    if !sources_are_readable() {
        return;
    }
    let source = crate_dir().join("tests/c").join(name);
    for compiler in installed(C) {
        for options in compiler.ways() {
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
fn btree() {
    test("btree.c");
}

#[test]
fn collective() {
    test("collective.c");
}

#[test]
fn retier() {
    test("retier.c");
}

#[test]
fn hostile() {
    test("hostile.c");
}

#[test]
fn misuse() {
    test("misuse.c");
}

#[test]
fn the_shared_library_can_be_loaded_late_and_closed_while_its_heap_runs() {
    if !sources_are_readable() {
        return;
    }
    for compiler in installed(C) {
        let dir = tempfile::tempdir().expect("a directory");
        let program = dir.path().join("plugin");
        let source = crate_dir().join("tests/c/late/plugin.c");
        succeed(compiler.command().arg(source).arg("-o").arg(&program).arg("-ldl"));
        // As it is: without room for thread-local data made by GLIBC_TUNABLES.
        run(Command::new(&program).arg(library("so")).env_remove("GLIBC_TUNABLES"));
    }
}
