//! C++ programs that use the library as its hosts do, and what the README says to them.

use crate::common::{
    CPP, Compiler, crate_dir, declared, generated, installed, run_program, sources_are_readable,
    succeed,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

fn test(source: &Path) {
    test_with(source, &installed(CPP));
}

fn test_with(source: &Path, compilers: &[Compiler]) {
    for compiler in compilers {
        for options in compiler.ways() {
            let program = compiler.program(source, options);
            println!("{} {} {options:?}", compiler.name, source.display());
            run_program(program.path());
        }
    }
}

#[test]
fn everything() {
    if sources_are_readable() {
        test(&crate_dir().join("tests/cpp/everything.cpp"));
    }
}

#[test]
fn guards_of_pages() {
    if sources_are_readable() {
        test(&crate_dir().join("tests/cpp/guards.cpp"));
    }
}

#[test]
fn two_threads_at_every_kind_of_handle() {
    if sources_are_readable() {
        test(&crate_dir().join("tests/cpp/threads.cpp"));
    }
}

/// Headers under the names by which the collective interface was published.
#[test]
fn containers_that_were_written_for_the_published_interface() {
    if sources_are_readable() {
        let newer = |compiler| Compiler { standard: "-std=c++20", ..compiler };
        let compilers: Vec<_> = installed(CPP).into_iter().map(newer).collect();
        test_with(&crate_dir().join("tests/published/containers.cpp"), &compilers);
    }
}

/// The errors of a source that does nothing but include the header.
fn errors(compiler: &Compiler, options: &[&str]) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a directory");
    let source = dir.path().join("includes.cpp");
    fs::write(&source, "#include \"farheap.hpp\"\n").expect("a source");
    let output = Command::new(compiler.name)
        .args(options)
        .arg("-fsyntax-only")
        .arg("-I")
        .arg(crate_dir().join("include"))
        .arg(&source)
        .output()
        .expect("the compiler runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().filter(|line| line.contains(": error: ")).map(str::to_owned).collect()
}

#[test]
fn a_compiler_that_lacks_what_the_header_needs_is_told_so_in_one_error() {
    if !sources_are_readable() {
        return;
    }
    let lacks = [
        ("-std=c++11", "farheap.hpp needs C++17: compile with -std=c++17 or later"),
        ("-std=c++14", "farheap.hpp needs C++17"),
        ("-fno-exceptions", "compile without -fno-exceptions, or use farheap.h"),
    ];
    for compiler in installed(CPP) {
        for (option, sentence) in lacks {
            let errors = errors(&compiler, &["-std=c++17", option]);
            let is_said = errors.first().is_some_and(|error| error.contains(sentence));
            assert!(is_said && errors.len() == 1, "{} {option}: {errors:#?}", compiler.name);
        }
        assert_eq!(errors(&compiler, &["-std=c++17", "-fno-rtti"]), Vec::<String>::new());
    }
}

/// Functions of the library that a compiled source calls.
fn called(compiler: &Compiler, source: &Path) -> BTreeSet<String> {
    let object = compiler.object(source, &[]);
    let output = succeed(Command::new("nm").arg("--undefined-only").arg(object.path()));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.split_whitespace().last()).map(str::to_owned).collect()
}

/// Which functions of the header no program of a directory calls.
fn uncalled(compilers: &[Compiler], dir: &str, extension: &str) -> Vec<String> {
    let Some(compiler) = compilers.first() else { return Vec::new() };
    let entries = fs::read_dir(crate_dir().join(dir)).expect("a directory");
    let sources = entries.map(|entry| entry.expect("an entry").path());
    let sources = sources.filter(|path| path.extension().is_some_and(|found| found == extension));
    let used: BTreeSet<String> = sources.flat_map(|source| called(compiler, &source)).collect();
    assert!(!used.is_empty(), "the programs in {dir} call nothing");
    declared().into_iter().filter(|name| !used.contains(name)).collect()
}

#[test]
fn every_function_is_called_from_c_and_from_cpp() {
    if !sources_are_readable() || Command::new("nm").arg("--version").output().is_err() {
        println!("skipped: nm or the sources are missing");
        return;
    }
    assert_eq!(uncalled(&installed(crate::common::C), "tests/c", "c"), Vec::<String>::new());
    assert_eq!(uncalled(&installed(CPP), "tests/cpp", "cpp"), Vec::<String>::new());
}

/// The programs of README and of the pages for C++ hosts: code with a `main`.
#[test]
fn the_cpp_programs_of_the_readme_and_of_the_book_compile_and_run() {
    if !sources_are_readable() {
        return;
    }
    for (page, wanted) in [("README.md", 1), ("book/src/how_to/cpp.md", 1)] {
        let text = fs::read_to_string(crate_dir().join("..").join(page)).expect("the page");
        let blocks = text.split("```cpp\n").skip(1).filter_map(|rest| rest.split("```").next());
        let programs: Vec<&str> = blocks.filter(|block| block.contains("int main(")).collect();
        assert_eq!(programs.len(), wanted, "{page}");
        for program in programs {
            test(generated("of_a_page.cpp", program).path());
        }
    }
}

#[test]
fn the_header_bears_the_warnings_of_strict_hosts_and_works_without_rtti() {
    if !sources_are_readable() {
        return;
    }
    const MORE: &[&str] =
        &["-Wshadow", "-Wconversion", "-Wsign-conversion", "-Wold-style-cast", "-Wcast-qual"];
    for compiler in installed(CPP) {
        for option in ["-frtti", "-fno-rtti"] {
            let text = "#include <farheap.hpp>\nstd::pmr::vector<int> of(farheap::far_resource &ssd) {\n\
                std::pmr::vector<int> made{&ssd};\nreturn made;\n}\n";
            let source = generated("strict.cpp", text);
            compiler.object(source.path(), &[MORE, &[option]].concat());
        }
    }
}
