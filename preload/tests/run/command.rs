//! `farheap run` as a command: what it passes on, what it refuses.

use crate::common::{REFUSED, compile, end, installed, permitted, run};
use std::os::unix::process::ExitStatusExt;

#[test]
fn exit_status_and_signal_of_the_program_are_passed_on() {
    if !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let ended = |text| end(run(&["--limit", "8MiB"]).args(["sh", "-c", text]), dir.path());
    assert_eq!(ended("exit 7").status.code(), Some(7));
    assert_eq!(ended("kill -TERM $$").status.signal(), Some(15));
    let said = ended("echo out; echo errors >&2");
    assert_eq!((said.out.as_str(), said.errors.as_str()), ("out\n", "errors\n"));
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let refused = |options: &[&str], program: &str| {
        let ended = end(run(options).arg(program), dir.path());
        assert_eq!(ended.out, "", "it ran: {ended:?}");
        (ended.status.code().expect("an exit status"), ended.errors)
    };
    let (status, text) = refused(&[], "no-such-program-anywhere");
    assert!(status == 127 && text.contains("no-such-program-anywhere: not found"), "{text}");
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "text").expect("room");
    let (status, text) = refused(&[], plain.to_str().expect("UTF-8"));
    assert!(status == 126 && text.contains("is not executable"), "{text}");
    let (status, text) = refused(&["--limit", "lots"], "true");
    assert!(status == REFUSED && text.contains("limit: `lots` is not a size"), "{text}");
    let (status, text) = refused(&["--config", "hanlders:4"], "true");
    assert!(status == REFUSED && text.contains("did you mean `handlers`?"), "{text}");
    let (status, text) = refused(&["--config", "mode:in_thread"], "true");
    assert!(status == REFUSED && text.contains("serves no fault of a system call"), "{text}");
    let program = dir.path().join("static");
    let source = "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 0; }";
    if compile("gcc", &["-static"], source, &program) {
        let (status, text) = refused(&[], program.to_str().expect("UTF-8"));
        assert!(status == REFUSED && text.contains("linked statically"), "{text}");
        let script = dir.path().join("script");
        std::fs::write(&script, format!("#!{}\n", program.display())).expect("room");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).expect("its mode");
        let (status, text) = refused(&[], script.to_str().expect("UTF-8"));
        assert!(status == REFUSED && text.contains("linked statically"), "{text}");
    }
}

#[test]
fn a_program_with_damaged_headers_cannot_be_executed() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = std::fs::read("/bin/true").expect("a program");
    let fields: [(&str, usize, &[u8]); 6] = [
        ("size of a header 0", 54, &[0, 0]),
        ("size of a header 65535", 54, &[255, 255]),
        ("no headers", 56, &[0, 0]),
        ("65535 headers", 56, &[255, 255]),
        ("headers behind the end", 32, &[0, 0, 0, 0, 0, 0, 0, 64]),
        ("headers at the last address", 32, &[255; 8]),
    ];
    let damaged = fields.map(|(name, at, bytes)| {
        let mut program = program.clone();
        program[at..at + bytes.len()].copy_from_slice(bytes);
        (name, program)
    });
    for (name, content) in damaged.into_iter().chain([("cut", program[..50].to_vec())]) {
        let (content_at, path) = (dir.path().join("content"), dir.path().join("program"));
        std::fs::write(&content_at, content).expect("room");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&content_at, mode).expect("its mode");
        crate::common::copy_program(&content_at, &path);
        let ended = end(run(&["--limit", "16MiB"]).arg(&path), dir.path());
        assert_eq!(ended.status.code(), Some(126), "{name}: {ended:?}");
        assert!(ended.errors.contains("the headers of the file are damaged"), "{name}: {ended:?}");
    }
}

#[test]
fn programs_that_cannot_take_the_library_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let source = "int main(void) { return 0; }";
    for (compiler, option, reason) in crate::common::WITHOUT_LIBRARY {
        let program = dir.path().join("program");
        if !compile(compiler, &[option], source, &program) {
            continue;
        }
        let ended = end(run(&["--limit", "16MiB"]).arg(&program), dir.path());
        assert_eq!(ended.status.code(), Some(REFUSED), "{option}: {ended:?}");
        assert!(ended.errors.contains(reason), "{option}: {ended:?}");
    }
}

#[test]
fn a_library_that_is_not_there_is_named_with_the_way_to_build_it() {
    if !cfg!(debug_assertions) {
        return println!("skipped: a release of the command has the library in it");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let copy = dir.path().join("farheap");
    crate::common::copy_program(&crate::common::farheap(), &copy);
    let mut command = std::process::Command::new(copy);
    let ended =
        end(command.args(["run", "true"]).env_remove("FARHEAP_PRELOAD_LIBRARY"), dir.path());
    assert_eq!(ended.status.code(), Some(REFUSED));
    assert!(ended.errors.contains("cargo build --release -p farheap-preload"), "{}", ended.errors);
}

#[test]
fn a_path_that_the_loader_would_split_is_refused() {
    for name in ["with blank", "with:colon"] {
        let dir = tempfile::Builder::new().prefix(name).tempdir().expect("a directory");
        let copy = dir.path().join("libfarheap_preload.so");
        std::fs::copy(crate::common::library(), &copy).expect("room");
        let ended = end(run(&[]).arg("true").env("FARHEAP_PRELOAD_LIBRARY", &copy), dir.path());
        assert_eq!(ended.status.code(), Some(REFUSED), "{ended:?}");
        assert!(ended.errors.contains("a blank or a colon"), "{}", ended.errors);
    }
}

#[test]
fn a_program_with_capabilities_is_refused_to_a_user_without() {
    if !installed("setcap") || !installed("setpriv") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).expect("its mode");
    let program = dir.path().join("capable");
    crate::common::copy_program("/bin/true".as_ref(), &program);
    let mut setcap = std::process::Command::new("setcap");
    if !end(setcap.arg("cap_net_raw+ep").arg(&program), dir.path()).status.success() {
        return println!("skipped: capabilities may not be set here");
    }
    let far = run(&["--limit", "16MiB"]);
    let mut command = std::process::Command::new("setpriv");
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    command.args(nobody).arg(far.get_program()).args(far.get_args()).arg(&program);
    let ended = end(command.env("FARHEAP_PRELOAD_LIBRARY", crate::common::library()), dir.path());
    assert_eq!(ended.status.code(), Some(REFUSED), "{ended:?}");
    assert!(ended.errors.contains("it has capabilities"), "{}", ended.errors);
}

#[test]
fn programs_that_are_started_have_the_library_unless_it_is_alone() {
    if !installed("sh") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "cat /proc/self/maps; echo; echo LD_PRELOAD=$LD_PRELOAD.";
    let maps = |options: &[&str], shell: &str, other: &str| {
        let mut command = run(options);
        end(command.args([shell, "-c", text]).env("LD_PRELOAD", other), dir.path()).out
    };
    assert!(maps(&["--limit", "8MiB"], "sh", "").contains("libfarheap_preload.so\n"));
    let other = dir.path().join("libother.so");
    let has_other = compile("gcc", &["-shared", "-fPIC"], "int other;", &other);
    let other = other.to_str().expect("UTF-8");
    // bash has a function `unsetenv` of its own.
    for shell in ["sh", "bash"].into_iter().filter(|shell| installed(shell)) {
        let alone = maps(&["--limit", "8MiB", "--alone"], shell, "");
        assert!(!alone.contains("libfarheap_preload.so"), "{alone}");
        assert!(alone.ends_with("LD_PRELOAD=.\n"), "{alone}");
        if has_other {
            let alone = maps(&["--limit", "8MiB", "--alone"], shell, other);
            assert!(!alone.contains("libfarheap_preload.so"), "{alone}");
            assert!(alone.ends_with(&format!("LD_PRELOAD={other}.\n")), "{alone}");
        }
    }
}

#[test]
fn a_program_is_run_inside_of_a_program_that_is_run() {
    if !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    // The inner one's address space is small enough for the outer one to take it for a program's mapping.
    let inner = run(&["--limit", "16MiB", "--config", "span:128MiB"]);
    let mut command = run(&["--limit", "32MiB"]);
    command.arg(inner.get_program()).args(inner.get_args()).args(["echo", "inside"]);
    let ended = end(&mut command, dir.path());
    assert_eq!(
        (ended.status.code(), ended.out.as_str()),
        (Some(0), "inside\n"),
        "{}",
        ended.errors
    );
}

#[test]
fn a_program_is_run_under_a_library_that_audits_the_loader() {
    let dir = tempfile::tempdir().expect("a directory");
    let audits = dir.path().join("libaudits.so");
    let text = "unsigned la_version(unsigned version) { return version; }";
    if permitted() && compile("gcc", &["-shared", "-fPIC"], text, &audits) {
        let mut command = run(&["--limit", "16MiB"]);
        let ended = end(command.args(["echo", "heard"]).env("LD_AUDIT", &audits), dir.path());
        assert_eq!(
            (ended.status.code(), ended.out.as_str()),
            (Some(0), "heard\n"),
            "{}",
            ended.errors
        );
    }
}

#[test]
fn programs_that_cannot_take_the_library_are_started_without_it() {
    if !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let starts = dir.path().join("starts");
    if !compile("gcc", &[], include_str!("../c/starts.c"), &starts) {
        return;
    }
    let source = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        int main(int count, char **given) {
            int first = count - 7;
            for (int n = 0; n < 7; n++)
                if (first < 1 || atoi(given[first + n]) != n + 1) return 3;
            const char *text = getenv("LD_PRELOAD");
            puts(text && strstr(text, "farheap") ? "with" : "without");
            return 0;
        }"#;
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").expect("a path"));
    let try_all = |name: &str, expected: &str, kind: &str| {
        let mut command = run(&["--limit", "16MiB"]);
        command.arg(&starts).arg(dir.path().join(name)).args([name, kind]).env("PATH", &path);
        let ended = end(&mut command, dir.path());
        assert_eq!(ended.status.code(), Some(0), "{name}: {ended:?}");
        let all = ended.out.lines().all(|line| line == expected);
        assert!(all && ended.out.lines().count() >= 10, "{name}: {ended:?}");
        ended.errors
    };
    assert!(compile("gcc", &[], source, &dir.path().join("plain")));
    assert_eq!(try_all("plain", "with", "program"), "");
    for (n, (compiler, option, reason)) in crate::common::WITHOUT_LIBRARY.into_iter().enumerate() {
        let name = format!("program{n}");
        if !compile(compiler, &[option], source, &dir.path().join(&name)) {
            continue;
        }
        let script = format!("script{n}");
        let content = dir.path().join("content");
        std::fs::write(&content, format!("#!{}/{name} -\n", dir.path().display())).expect("room");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&content, mode).expect("its mode");
        crate::common::copy_program(&content, &dir.path().join(&script));
        for (name, kind) in [(name, "program"), (script, "script")] {
            let errors = try_all(&name, "without", kind);
            assert_eq!(errors.matches("is started without far memory").count(), 1, "{errors}");
            assert!(errors.contains(reason), "{errors}");
        }
    }
}

#[test]
fn the_heap_starts_when_the_program_has_used_as_much_as_is_documented() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("grows");
    let source = r#"
        #include <dirent.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        static int threads(void) {
            DIR *tasks = opendir("/proc/self/task");
            int count = 0;
            for (struct dirent *task; (task = readdir(tasks)); ) count += task->d_name[0] != '.';
            closedir(tasks);
            return count;
        }
        static void use(int mebibytes) {
            for (int n = 0; n < mebibytes * 16; n++) memset(malloc(65536), n + 1, 65536);
        }
        int main(int count, char **arguments) {
            for (int n = 1; n < count; n++) {
                use(atoi(arguments[n]));
                printf("%s ", threads() > 1 ? "more" : "one");
            }
        }"#;
    if permitted() && compile("gcc", &["-fno-builtin"], source, &program) {
        let of = |limit, steps: [&str; 2]| {
            end(run(&["--limit", limit]).arg(&program).args(steps), dir.path()).out
        };
        // At 6 MiB, and at a sixteenth of a small limit; what the allocator has for itself counts too.
        assert_eq!(of("128MiB", ["5", "5"]), "one more ");
        assert_eq!(of("64MiB", ["2", "3"]), "one more ");
        assert_eq!(of("24MiB", ["0", "2"]), "one more ");
    }
}

#[test]
fn code_of_the_library_stays_in_memory_where_the_limit_is_what_a_group_leaves() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("locked");
    let source = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/resource.h>
        #include <unistd.h>
        int main(void) {
            for (int n = 0; n < 160; n++) memset(malloc(65536), 1, 65536);
            struct rlimit most;
            getrlimit(RLIMIT_MEMLOCK, &most);
            FILE *status = fopen("/proc/self/status", "r");
            char line[256];
            long locked = 0;
            while (fgets(line, sizeof line, status)) sscanf(line, "VmLck: %ld", &locked);
            puts(locked > 0 ? "locked" : geteuid() && most.rlim_cur < 8 << 20 ? "not allowed" : "not locked");
        }"#;
    if !permitted() || !compile("gcc", &["-fno-builtin"], source, &program) {
        return;
    }
    let of = |options| end(run(options).arg(&program), dir.path()).out;
    assert_eq!(of(&["--limit", "64MiB"]), "not locked\n", "code leaves there");
    match of(&[]).as_str() {
        "not allowed\n" => println!("skipped: the process may lock less than 8 MiB"),
        other => assert_eq!(other, "locked\n"),
    }
}

#[test]
fn a_program_that_uses_little_memory_has_no_far_heap_and_no_threads() {
    if !installed("sh") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = run(&["--limit", "8MiB", "--stats"]);
    let text = "ls /proc/$$/task | wc -l; grep -c anon_inode /proc/$$/maps; exit 0";
    let ended = end(command.args(["sh", "-c", text]), dir.path());
    assert_eq!(ended.out, "1\n0\n");
    assert!(ended.errors.contains("nothing far"), "{}", ended.errors);
}

#[test]
fn frees_that_are_wrong_end_the_program_with_address_and_cause() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("wrong");
    let options = ["-fno-builtin", "-Wno-error"];
    if !permitted() || !compile("gcc", &options, include_str!("../c/wrong_free.c"), &program) {
        return;
    }
    // With `check:on`, and whether without it.
    let cases = [
        ("twice", "freed twice", true),
        ("others", "freed twice", false),
        ("large", "freed twice", true),
        ("stack", "no block", false),
        ("middle", "no block", false),
        ("behind", "written to behind its end", false),
    ];
    // Maintenance may empty a cache between two frees: then only `check` tells.
    const ATTEMPTS: u32 = 20;
    let fails = |case, cause, options: &[&str], attempts: u32| {
        let is_told = (0..attempts).any(|_| {
            let ended = end(run(options).arg(&program).arg(case), dir.path());
            let wanted = format!("farheap: {}: {cause}", ended.out.trim());
            let is_right =
                ended.status.signal() == Some(libc::SIGABRT) && ended.errors.contains(&wanted);
            if !is_right {
                println!("{case}: {}, not `{wanted}`: {}", ended.status, ended.errors);
            }
            is_right
        });
        assert!(is_told, "{case} {options:?}");
    };
    for (case, cause, always) in cases {
        fails(case, cause, &["--limit", "32MiB", "--config", "check:on"], 1);
        if always {
            fails(case, cause, &["--limit", "32MiB"], ATTEMPTS);
        }
    }
}
