//! C programs that use the library as its hosts do.

use crate::common::{
    C, crate_dir, in_memory, installed, library, on_disk, run, run_program, run_program_in,
    sources_are_readable, succeed,
};
use std::process::Command;
use tempfile::TempDir;

fn test(name: &str) {
    test_in(name, in_memory);
}

fn test_in(name: &str, dir: fn() -> TempDir) {
    if !sources_are_readable() {
        return;
    }
    let source = crate_dir().join("tests/c").join(name);
    for compiler in installed(C) {
        for options in compiler.ways() {
            let program = compiler.program(&source, options);
            println!("{} {name} {options:?}", compiler.name);
            run_program_in(dir(), program.path());
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

/// Asks for files of sizes that a disk refuses, and memory does not.
#[test]
fn hostile() {
    test_in("hostile.c", on_disk);
}

#[test]
fn wrong_free() {
    test("wrong_free.c");
}

#[test]
fn misuse() {
    test("misuse.c");
}

/// Not with AddressSanitizer, which has locks of its own at a fork.
#[test]
fn early_fork() {
    if sources_are_readable() {
        for compiler in installed(C) {
            run_program(compiler.program(&crate_dir().join("tests/c/early_fork.c"), &[]).path());
        }
    }
}

/// A program of two threads. The span is small: the sanitizer leaves a program little address space.
const UNDER_TSAN: &str = r#"
#include "farheap.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
static void *work(void *unused) {
    for (int n = 0; n < 200; n++) {
        char *block = far_malloc(200000);
        if (!block) return unused;
        memset(block, n, 200000);
        far_free(block);
    }
    return NULL;
}
int main(void) {
    farheap_heap *heap = NULL;
    pthread_t thread;
    if (farheap_start("far_limit:8MiB,capacity:64MiB,span:16GiB,mode:user", &heap)) {
        printf("skipped: %s\n", farheap_last_message());
        return 77;
    }
    work(NULL);
    pthread_create(&thread, NULL, work, NULL);
    pthread_join(thread, NULL);
    return farheap_shutdown(heap) != FARHEAP_OK;
}
"#;

/// Threads of the library are in no race with the host, but ThreadSanitizer does not see what orders them.
#[test]
fn thread_sanitizer_is_quiet_about_the_shared_library_with_the_suppression_that_is_documented() {
    if !sources_are_readable() {
        return;
    }
    let documented = include_str!("../../../book/src/how_to/cpp.md");
    let suppression = "called_from_lib:libfarheap";
    assert!(documented.contains(suppression), "book/src/how_to/cpp.md names another one");
    for compiler in installed(&C[..1]) {
        let dir = tempfile::tempdir().expect("a directory");
        let (program, shared) = (dir.path().join("program"), dir.path().join("libfarheap.so.1"));
        std::fs::copy(library("so"), &shared).expect("room");
        let source = dir.path().join("source");
        std::fs::write(&source, UNDER_TSAN).expect("room");
        let mut build = compiler.command();
        build.arg("-fsanitize=thread").args(["-x", "c"]).arg(&source).args(["-x", "none"]);
        if !build
            .arg("-o")
            .arg(&program)
            .arg(&shared)
            .output()
            .is_ok_and(|built| built.status.success())
        {
            println!("skipped: {} has no runtime for ThreadSanitizer", compiler.name);
            continue;
        }
        let known = dir.path().join("known");
        std::fs::write(&known, format!("{suppression}\n")).expect("room");
        let options = format!("suppressions={}", known.display());
        run(Command::new(&program).env("TSAN_OPTIONS", options).env("LD_LIBRARY_PATH", dir.path()));
    }
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
