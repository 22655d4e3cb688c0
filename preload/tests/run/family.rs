//! The functions of the malloc family, called by programs in C and C++.

use crate::common::{compile, end, installed, permitted, run};
use std::path::Path;

/// Runs a compiled program under a limit that it exceeds; it says that all was right.
fn expect_right(program: &Path, argument: Option<&Path>, dir: &Path) {
    let mut command = run(&["--limit", "8MiB", "--stats"]);
    let ended = end(command.arg(program).args(argument), dir);
    assert_eq!((ended.status.code(), ended.out.as_str()), (Some(0), "right\n"), "{}", ended.errors);
    assert!(ended.errors.contains(": far "), "no statistics: {}", ended.errors);
    assert!(!ended.errors.contains(" 0 B written"), "nothing left: {}", ended.errors);
}

#[test]
fn the_malloc_family_is_as_the_c_library_documents_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("family");
    let options = ["-fno-builtin", "-Wno-error"];
    if permitted() && compile("gcc", &options, include_str!("../c/family.c"), &program) {
        expect_right(&program, None, dir.path());
        let mut checked = run(&["--limit", "48MiB", "--config", "check:on"]);
        let ended = end(checked.arg(&program), dir.path());
        assert_eq!(
            (ended.status.code(), ended.out.as_str()),
            (Some(0), "right\n"),
            "{}",
            ended.errors
        );
    }
}

#[test]
fn memory_that_a_program_maps_is_taken_back_in_parts_moved_and_protected() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("mapping");
    if permitted() && compile("gcc", &[], include_str!("../c/mapping.c"), &program) {
        expect_right(&program, None, dir.path());
    }
}

#[test]
fn what_a_program_maps_in_place_of_what_it_unmapped_is_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("over");
    if !permitted() || !compile("gcc", &[], include_str!("../c/holes.c"), &program) {
        return;
    }
    // With little address space that can be far all of it is used, up to both ends.
    for config in ["span:1TiB", "span:128MiB"] {
        let mut command = run(&["--limit", "24MiB", "--config", config, "--stats"]);
        let ended = end(command.arg(&program).arg(dir.path().join("file")), dir.path());
        let said = (ended.status.code(), ended.out.as_str());
        assert_eq!(said, (Some(0), "right\n"), "{config}: {}", ended.errors);
        assert!(ended.errors.contains(": far "), "no statistics: {}", ended.errors);
    }
}

#[test]
fn memory_that_a_program_reserves_without_access_is_far_when_it_is_opened() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("reserved");
    if permitted() && compile("gcc", &[], include_str!("../c/reserved.c"), &program) {
        let ended = end(run(&["--limit", "24MiB", "--stats"]).arg(&program), dir.path());
        assert_eq!(
            (ended.status.code(), ended.out.as_str()),
            (Some(0), "right\n"),
            "{}",
            ended.errors
        );
        // It opens 40 MiB, and has 8 besides.
        assert!(ended.resident_max < 36 << 20, "{}: {}", ended.resident_max, ended.errors);
    }
}

#[test]
fn what_a_program_drops_reads_as_zero_whether_it_had_left_or_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("advice");
    if permitted() && compile("gcc", &[], include_str!("../c/advice.c"), &program) {
        expect_right(&program, None, dir.path());
    }
}

#[test]
fn a_program_that_closes_what_it_does_not_know_keeps_its_far_memory() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("descriptors");
    if !permitted() || !compile("gcc", &[], include_str!("../c/descriptors.c"), &program) {
        return;
    }
    expect_right(&program, None, dir.path());
    let mut command = run(&["--limit", "8MiB"]);
    command.args(["sh", "-c", "\"$0\" without 0<&- 1>&- 2>&-"]).arg(&program);
    let ended = end(&mut command, dir.path());
    assert_eq!(ended.status.code(), Some(0), "without standard streams: {}", ended.errors);
}

#[test]
fn a_process_ends_with_the_last_thread_of_the_program() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("last_thread");
    if permitted() && compile("gcc", &[], include_str!("../c/last_thread.c"), &program) {
        let ended = end(run(&["--limit", "32MiB"]).arg(&program), dir.path());
        let said = (ended.status.code(), ended.out.as_str());
        assert_eq!(said, (Some(0), "right\n"), "{}: {}", ended.status, ended.errors);
    }
}

#[test]
fn threads_end_while_what_the_kernel_needs_for_that_has_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("threads_end");
    if permitted() && compile("gcc", &[], include_str!("../c/threads_end.c"), &program) {
        let options = ["--limit", "24MiB", "--stats"];
        let ended = end(run(&options).arg(&program), dir.path());
        let said = (ended.status.code(), ended.out.as_str());
        assert_eq!(said, (Some(0), "right\n"), "{}: {}", ended.status, ended.errors);
    }
}

#[test]
fn a_program_that_locks_all_of_its_memory_keeps_to_the_limit() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("locked");
    if permitted() && compile("gcc", &[], include_str!("../c/locked.c"), &program) {
        expect_right(&program, None, dir.path());
    }
}

#[test]
fn what_jemalloc_has_beside_the_family_may_be_mixed_with_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("extended");
    if permitted() && compile("gcc", &["-fno-builtin"], include_str!("../c/extended.c"), &program) {
        expect_right(&program, None, dir.path());
    }
}

#[test]
fn the_operators_of_cpp_are_served() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("operators");
    let options = ["-std=c++17", "-fsized-deallocation", "-Wno-error"];
    if permitted() && compile("g++", &options, include_str!("../c/operators.cpp"), &program) {
        expect_right(&program, None, dir.path());
    }
}

#[test]
fn libraries_with_thread_local_variables_are_loaded_while_threads_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let (program, library) = (dir.path().join("variables"), dir.path().join("variable0.so"));
    let text = "static __thread int variable = 5; int *place(void) { return &variable; }";
    if !permitted()
        || !compile("gcc", &[], include_str!("../c/variables.c"), &program)
        || !compile("gcc", &["-shared", "-fPIC"], text, &library)
    {
        return;
    }
    for n in 1..60 {
        let copy = dir.path().join(format!("variable{n}.so"));
        std::fs::copy(&library, copy).expect("room");
    }
    expect_right(&program, Some(dir.path()), dir.path());
}

#[test]
fn nothing_is_written_to_a_file_that_has_the_number_of_standard_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("standard_error");
    if !permitted() || !compile("gcc", &[], include_str!("../c/standard_error.c"), &program) {
        return;
    }
    let data = dir.path().join("data");
    let ended = |how: &str| {
        let ended = end(
            run(&["--limit", "16MiB", "--stats"]).arg(&program).arg(&data).arg(how),
            dir.path(),
        );
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        assert_eq!(std::fs::read(&data).expect("the file"), b"data", "{how}: {}", ended.errors);
        ended.errors
    };
    let said = ended("one");
    assert!(said.contains("is farheap's") && said.contains("nothing far"), "{said}");
    // The duplicate is gone as well: nothing is said.
    assert_eq!(ended("all"), "");
}

/// A reader of what a daemon says waits until the last writer has closed it.
#[test]
fn a_child_that_closes_standard_error_has_no_copy_of_it() {
    let dir = tempfile::tempdir().expect("a directory");
    if !permitted() || !installed("sh") || !installed("readlink") {
        return;
    }
    let open = dir.path().join("open");
    let text = r#"(exec 2>&-; sh -c 'readlink /proc/$PPID/fd/* >"$0"' "$1"; :); echo said >&2"#;
    let mut command = run(&["--limit", "16MiB"]);
    let ended = end(command.args(["sh", "-c", text, "sh"]).arg(&open), dir.path());
    assert_eq!(ended.errors, "said\n");
    let open = std::fs::read_to_string(&open).expect("what the child has open");
    assert!(open.contains("/out") && !open.contains("/errors"), "{open}");
}

#[test]
fn libraries_that_are_bound_deeply_have_the_same_malloc() {
    let dir = tempfile::tempdir().expect("a directory");
    let (program, library) = (dir.path().join("deeply"), dir.path().join("libdeeply.so"));
    let given = r#"
        #define _GNU_SOURCE
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        char *give(void) { return strdup("from the library"); }
        void take(char *block) { puts(block); free(block); }"#;
    // The library is found beside the program because the program says so, which asks for it by its name alone.
    let text = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        static int use(void *library) {
            if (library == NULL) { puts(dlerror()); return 1; }
            char *(*give)(void) = (char *(*)(void))dlsym(library, "give");
            void (*take)(char *) = (void (*)(char *))dlsym(library, "take");
            for (int n = 0; n < 1000; n++) free(give());
            take(strcpy(malloc(200000), "from the program"));
            return 0;
        }
        int main(void) {
            char *far = malloc(32 << 20);
            memset(far, 1, 32 << 20);
            if (use(dlopen("libdeeply.so", RTLD_NOW | RTLD_DEEPBIND))) return 1;
            if (use(dlmopen(LM_ID_BASE, "libdeeply.so", RTLD_NOW | RTLD_DEEPBIND))) return 1;
            /* Another name space has a C library of its own. */
            char *(*give)(void) = (char *(*)(void))dlsym(dlmopen(LM_ID_NEWLM, "libdeeply.so", RTLD_NOW), "give");
            puts(give());
            puts(dlopen("no such library", RTLD_NOW) ? "found" : dlerror());
            return far[1000] != 1;
        }"#;
    if !permitted()
        || !compile("gcc", &["-shared", "-fPIC"], given, &library)
        || !compile("gcc", &["-fno-builtin", "-Wl,-rpath,$ORIGIN", "-ldl"], text, &program)
    {
        return;
    }
    let ended = end(run(&["--limit", "24MiB", "--stats"]).arg(&program), dir.path());
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let lines =
        "from the program\nfrom the program\nfrom the library\nno such library: cannot open";
    assert!(ended.out.starts_with(lines), "{ended:?}");
    assert_eq!(ended.errors.matches("RTLD_DEEPBIND").count(), 1, "{}", ended.errors);
    assert!(ended.errors.contains(": far "), "no statistics: {}", ended.errors);
}

#[test]
fn a_name_space_of_users_is_refused_with_the_way_to_have_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("unshares");
    let text = r#"
        #define _GNU_SOURCE
        #include <errno.h>
        #include <sched.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        int main(void) {
            char *far = malloc(32 << 20);
            memset(far, 1, 32 << 20);
            int done = unshare(CLONE_NEWUSER);
            printf("%d %d\n", done, errno == EINVAL);
            return far[1000] != 1;
        }"#;
    if permitted() && compile("gcc", &["-fno-builtin"], text, &program) {
        let ended = end(run(&["--limit", "24MiB"]).arg(&program), dir.path());
        assert_eq!(ended.out, "-1 1\n", "{}", ended.errors);
        assert!(ended.errors.contains("unshare -U farheap run"), "{}", ended.errors);
    }
}

#[test]
fn a_program_with_a_userfaultfd_has_its_mappings_local_if_asked_to() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("registers");
    let text = r#"
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <linux/userfaultfd.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/ioctl.h>
        #include <sys/mman.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int main(void) {
            char *far = malloc(32 << 20);
            memset(far, 1, 32 << 20);
            int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
            struct uffdio_api api = { .api = UFFD_API };
            if (fd < 0 || ioctl(fd, UFFDIO_API, &api)) { puts("not permitted"); return 0; }
            for (size_t bytes = 64 << 10; bytes <= 256 << 20; bytes *= 4)
                for (int protection = PROT_NONE; protection <= 3; protection += 3) {
                    char *own = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                    struct uffdio_register range = { { (size_t)own, bytes }, UFFDIO_REGISTER_MODE_MISSING, 0 };
                    if (ioctl(fd, UFFDIO_REGISTER, &range)) { perror("register"); return 1; }
                }
            puts("registered");
            return far[1000] != 1;
        }"#;
    if permitted() && compile("gcc", &["-fno-builtin"], text, &program) {
        let mut command = run(&["--limit", "24MiB", "--config", "threshold:off", "--stats"]);
        let ended = end(command.arg(&program), dir.path());
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        println!("{}", ended.out.trim());
        assert!(ended.errors.contains(": far 32"), "malloc's memory is far: {}", ended.errors);
    }
}
