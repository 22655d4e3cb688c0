//! The house rules that the compiler does not check, checked on the text of the sources.
//!
//! Layers use only lower layers, system calls stay in `sys`, unsafe code is announced and listed,
//! files and functions stay short. Every rule reports all of its violations at once.

mod tidy_text;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use tidy_text::fields::{open_fields, wide_structs};
use tidy_text::imports::{Modules, cycles};
use tidy_text::methods::methods_of_types;
use tidy_text::types::{takers, types};
use tidy_text::{Source, is_word, words};

/// Layers, lowest first; modules of one layer are siblings and do not use each other. The table
/// in `book/src/design/architecture.md` says what they are.
const LAYERS: &[&[&str]] = &[
    &["base"],
    &["sys"],
    &["meta"],
    &["store"],
    &["limit"],
    &["paging", "pool"],
    &["heap"],
    &["config"],
    &["runtime"],
];
/// What `config` uses, though its layer is high: it only describes.
const CONFIG_USES: &[&str] = &["base", "sys", "store", "limit", "paging", "config"];

/// Longest file, in lines.
const FILE_LINES_MAX: usize = 800;
/// Longest function, in lines; from [`FUNCTION_LINES_LONG`] on it is listed.
const FUNCTION_LINES_MAX: usize = 100;
const FUNCTION_LINES_LONG: usize = 70;
/// Maximum number of fields of a type: one with more is several types.
const FIELDS_MAX: usize = 12;
/// Maximum number of methods of a type in all its files: one with more is several types.
const METHODS_MAX: usize = 40;
/// How many lines above an unsafe block its safety comment may begin.
const SAFETY_REACH: usize = 25;

/// Crates that make system calls.
const SYSTEM_CRATES: &[&str] = &["libc", "nix", "rustix", "io_uring"];
/// Names of `libc` that are types: free to use anywhere, as are its constants.
const LIBC_TYPES: &[&str] = &[
    "c_char", "c_int", "c_long", "c_uint", "c_ulong", "c_void", "iovec", "off_t", "pid_t",
    "size_t", "ssize_t",
];

/// Modules that stand in for lower layers, or look past them, in unit tests.
const TEST_MODULES: &[&str] = &["tests", "testing"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below the directories that exist, in order.
fn sources(dirs: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = dirs.iter().map(|dir| root().join(dir)).collect();
    while let Some(path) = open.pop() {
        if path.ends_with("target") || path.is_symlink() {
            continue; // Built, of a workspace of its own; sources of another package.
        }
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("a readable directory");
            open.extend(entries.map(|entry| entry.expect("a readable entry").path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a readable file");
            let name = path.strip_prefix(root()).expect("below the root");
            found.push(Source::new(name.to_str().expect("UTF-8"), text));
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The sources of the library.
fn library() -> Vec<Source> {
    sources(&["src"])
}

/// Members that are libraries over or below the public interface, and keep the rules of the library inside.
const MEMBERS: &[&str] = &["collections", "metrics", "network", "segments"];

/// Code of all crates that programs run.
const SHIPPED: &[&str] = &[
    "src",
    "cli/src",
    "collections/src",
    "ffi/src",
    "metrics/src",
    "network/src",
    "preload/src",
    "segments/src",
];

/// The sources of the library, and of each member that is one, which are named from its own root; with what begins
/// their names in a report.
fn libraries() -> Vec<(String, Vec<Source>)> {
    let members = MEMBERS.iter().map(|member| {
        let mut sources = sources(&[&format!("{member}/src")]);
        for source in &mut sources {
            source.name = source.name[member.len() + 1..].to_owned();
        }
        (format!("{member}/"), sources)
    });
    std::iter::once((String::new(), library())).chain(members).collect()
}

/// All sources of the workspace.
fn everything() -> Vec<Source> {
    const FOLDERS: &str = "src cli collections ffi integrations lab metrics network papers peers \
        preload segments tests examples benches";
    sources(&FOLDERS.split(' ').collect::<Vec<_>>())
}

/// Fails with all violations of a rule.
fn report(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}:\n  {}\n", violations.join("\n  "));
}

fn rank(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// The top-level module that a source of the library belongs to; `None` for `lib.rs`.
fn module_of(name: &str) -> Option<&str> {
    let below = name.strip_prefix("src/")?;
    let module = below.split('/').next()?.trim_end_matches(".rs");
    (module != "lib").then_some(module)
}

/// Whether a source is compiled for tests only: modules with these names are, see
/// [`test_modules_are_compiled_for_tests_only`].
fn is_test(name: &str) -> bool {
    let dirs =
        ["tests/", "examples/", "benches/", "lab/", "cli/tests/", "ffi/tests/", "preload/tests/"];
    let below = |member: &str| {
        let rest = name.strip_prefix(member).and_then(|rest| rest.strip_prefix('/'));
        rest.is_some_and(|rest| dirs.iter().any(|dir| rest.starts_with(dir)))
    };
    dirs.iter().any(|dir| name.starts_with(dir))
        || MEMBERS.iter().any(|member| below(member))
        || TEST_MODULES.iter().any(|module| name.ends_with(&format!("/{module}.rs")))
}

/// Which module each name that `lib.rs` re-exports comes from.
fn re_exports(lib: &Source) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for statement in lib.code.split(';') {
        let Some((_, path)) = statement.split_once("pub use ") else { continue };
        let path: Vec<&str> = words(path).collect();
        let from = path.iter().copied().filter(|word| *word != "self" && *word != "crate");
        let Some(module) = from.clone().next() else { continue };
        found.extend(from.skip(1).map(|name| (name.to_owned(), module.to_owned())));
    }
    found
}

/// The names that follow `crate::` on a line, those in braces too.
fn crate_names(code: &str, at: usize) -> Vec<&str> {
    let rest = code[at + "crate::".len()..].trim_start();
    let Some(list) = rest.strip_prefix('{') else {
        return words(rest).take(1).collect();
    };
    let mut names = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (index, c) in list.char_indices() {
        match c {
            ',' | '}' if depth == 0 => {
                names.extend(words(&list[start..index]).next());
                start = index + 1;
            }
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if c == '}' && depth == 0 && start == index + 1 {
            break;
        }
    }
    names
}

#[test]
fn a_module_uses_only_its_own_and_lower_layers() {
    let library = library();
    let lib = library.iter().find(|source| source.name == "src/lib.rs").expect("lib.rs");
    let exported = re_exports(lib);
    let mut violations = Vec::new();
    for source in &library {
        let Some(module) = module_of(&source.name) else { continue };
        let Some(own) = rank(module) else {
            violations.push(format!("{}: `{module}` is in no layer of tests/tidy.rs", source.name));
            continue;
        };
        for (at, _) in source.code.match_indices("crate::") {
            if source.code[..at].ends_with(is_word) {
                continue;
            }
            for name in crate_names(&source.code, at) {
                let used = exported.get(name).map_or(name, String::as_str);
                let allowed = match rank(used) {
                    // A macro, or an item of the crate root itself.
                    None => true,
                    Some(_) if module == "config" => CONFIG_USES.contains(&used),
                    Some(other) => other < own || used == module,
                };
                if !allowed {
                    let line = source.line_of(at);
                    violations.push(format!("{}:{line}: `{module}` uses `{used}`", source.name));
                }
            }
        }
    }
    report("a module uses only its own and lower layers", &violations);
}

#[test]
fn files_of_a_layer_use_each_other_in_one_direction() {
    let mut violations = Vec::new();
    for (root, mut sources) in libraries() {
        sources.retain(|source| !is_test(&source.name));
        let modules = Modules::new(&sources);
        let uses = modules.uses();
        // A member is one layer.
        let layers: Vec<&str> = match root.as_str() {
            "" => LAYERS.iter().copied().flatten().copied().collect(),
            member => vec![member],
        };
        for layer in layers {
            let found = cycles(&uses, |name| layer == root || module_of(name) == Some(layer));
            violations.extend(found.iter().map(|cycle| format!("{layer}: {}", cycle.join(", "))));
        }
    }
    report("no import cycle between files inside a layer", &violations);
}

#[test]
fn a_field_is_named_in_its_own_folder_only() {
    let mut violations = Vec::new();
    for (root, sources) in libraries() {
        for source in sources.iter().filter(|source| !is_test(&source.name)) {
            let name = &source.name;
            let open = open_fields(source);
            violations
                .extend(open.iter().map(|(line, field)| format!("{root}{name}:{line}: {field}")));
        }
    }
    let rule = "a field is named in the folder of its struct only, but for plain data";
    report(rule, &violations);
}

#[test]
fn types_have_few_fields() {
    let mut violations = Vec::new();
    for source in everything().iter().filter(|source| !is_test(&source.name)) {
        let wide = wide_structs(source, FIELDS_MAX);
        violations
            .extend(wide.iter().map(|(line, what)| format!("{}:{line}: {what}", source.name)));
    }
    report("types of at most 12 fields, but for plain data", &violations);
}

#[test]
fn types_have_few_methods() {
    let sources = everything().into_iter().filter(|source| !is_test(&source.name));
    let methods = methods_of_types(&sources.collect::<Vec<_>>());
    assert!(methods.len() > 300, "{} types: the sources were not understood", methods.len());
    let many = methods.into_iter().filter(|(_, count)| *count > METHODS_MAX);
    let violations = many.map(|((module, name), count)| format!("{module}: `{name}` has {count}"));
    report("types of at most 40 methods", &violations.collect::<Vec<_>>());
}

#[test]
fn methods_are_counted_over_all_files_of_a_type() {
    let source = |name: &str, code: &str| Source::new(name, code.to_owned());
    let sources = [
        source(
            "src/a/b.rs",
            "\nimpl<K: Fn() -> u8> Map<K> {\n    fn a() { fn inner() {} }\n    fn b();\n}",
        ),
        source(
            "src/a/c.rs",
            "\nimpl Map<u8>\nwhere\n    u8: Copy,\n{\n    pub(super) fn c() {}\n}\n#[cfg(test)]\nmod tests {\nimpl Map<u8> { fn t() {} }\n}",
        ),
        source(
            "src/a.rs",
            "\nimpl fmt::Debug for Map<u8> { fn fmt() {} }\nfn f() -> impl Iterator { x }",
        ),
        source("src/b.rs", "\nimpl Map { fn other() {} }"),
    ];
    let found: Vec<_> = methods_of_types(&sources).into_iter().collect();
    let of = |module: &str, count| ((module.to_owned(), "Map".to_owned()), count);
    assert_eq!(found, [of("a", 3), of("b", 1)]);
}

/// Names of types that have several meanings, and why they keep them.
const SHARED_NAMES: &[(&str, &str)] = &[
    ("Inner", "inner nodes of two maps"),
    ("Leaf", "leaves of two maps"),
    ("Node", "nodes of four maps"),
    ("Result", "what the standard library calls so, with a crate's error"),
];
/// Maximum number of them.
const SHARED_NAMES_MAX: usize = 20;

#[test]
fn a_name_of_a_type_has_one_meaning() {
    let sources = sources(SHIPPED);
    let is_left_out = |name: &str| {
        is_test(name)
            || name.contains("/tests/")
            || name.contains("/models/")
            || name.ends_with("/models.rs")
    };
    let mut meanings: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !is_left_out(&source.name)) {
        for (line, name) in types(source) {
            meanings.entry(name).or_default().push(format!("{}:{line}", source.name));
        }
    }
    assert!(meanings.len() > 500, "{} types: the sources were not understood", meanings.len());
    const { assert!(SHARED_NAMES.len() <= SHARED_NAMES_MAX) };
    meanings.retain(|_, places| places.len() > 1);
    let is_listed = |name: &str| SHARED_NAMES.iter().any(|(listed, _)| *listed == name);
    let unlisted = meanings.iter().filter(|(name, _)| !is_listed(name));
    let mut violations: Vec<String> =
        unlisted.map(|(name, places)| format!("`{name}`: {}", places.join(", "))).collect();
    let unique = SHARED_NAMES.iter().filter(|(name, _)| !meanings.contains_key(name));
    violations
        .extend(unique.map(|(name, _)| format!("`{name}` has one meaning: not to be listed")));
    report("a name of a type has one meaning", &violations);
}

/// Maximum number of functions outside of `paging::pager` that take the whole of a region's state. Others take the part
/// that they use: their signatures tell what they may touch.
const PAGER_TAKERS_MAX: usize = 28;

#[test]
fn few_functions_take_the_whole_pager() {
    let mut takers_of_all = Vec::new();
    for source in library().iter().filter(|source| !source.name.starts_with("src/paging/pager/")) {
        let found = takers(source, "Pager").into_iter();
        takers_of_all.extend(found.map(|(line, name)| format!("{}:{line}: {name}", source.name)));
    }
    assert!(!takers_of_all.is_empty(), "the sources were not understood");
    if takers_of_all.len() > PAGER_TAKERS_MAX {
        report("at most 28 functions outside of `paging::pager` take a `Pager`", &takers_of_all);
    }
}

#[test]
fn a_count_is_read_only_where_it_is_shown() {
    let mut violations = Vec::new();
    for source in library().iter().filter(|source| !is_test(&source.name)) {
        let functions = source.functions();
        for (at, _) in source.code.match_indices(".reading") {
            let line = source.line_of(at);
            let around = functions.iter().filter(|f| (f.line..f.line + f.lines).contains(&line));
            let inner = around.min_by_key(|function| function.lines);
            let is_shown = source.name.ends_with("/stats.rs")
                || inner.is_some_and(|function| function.name == "show");
            if !is_shown {
                violations.push(format!("{}:{line}", source.name));
            }
        }
    }
    report(
        "`Counter::reading` is called by functions named `show` and in `stats.rs` only",
        &violations,
    );
}

#[test]
fn paths_are_followed_through_modules_and_re_exports() {
    let source = |name: &str, code: &str| Source::new(name, code.to_owned());
    let sources = [
        source("src/lib.rs", "pub mod a; pub use a::Item;"),
        source("src/a/mod.rs", "mod b; mod c; pub use b::{Item, Other as Alias};"),
        source("src/a/b.rs", "pub struct Item; fn f() { super::c::run() }"),
        source("src/a/c.rs", "use crate::a::Alias; #[cfg(test)] mod tests { use crate::d::X; }"),
        source("src/d.rs", "use crate::{Item, a}; use std::fmt; fn g() { a::c::run() }"),
    ];
    let modules = Modules::new(&sources);
    let uses = modules.uses();
    let of = |name: &str| uses[name].iter().copied().collect::<Vec<_>>();
    assert_eq!(of("src/a/mod.rs"), Vec::<&str>::new());
    assert_eq!(of("src/a/b.rs"), ["src/a/c.rs"]);
    assert_eq!(of("src/a/c.rs"), ["src/a/b.rs"]);
    assert_eq!(of("src/d.rs"), ["src/a/b.rs", "src/a/mod.rs"]);
    assert_eq!(cycles(&uses, |_| true), [["src/a/b.rs", "src/a/c.rs"]]);
}

#[test]
fn only_sys_makes_system_calls_and_only_heap_calls_jemalloc() {
    let mut violations = Vec::new();
    let libraries = libraries();
    let sources =
        libraries.iter().flat_map(|(root, sources)| sources.iter().map(move |s| (root, s)));
    for (root, source) in sources.filter(|(_, source)| !is_test(&source.name)) {
        let module = module_of(&source.name);
        for name in SYSTEM_CRATES {
            let prefix = format!("{name}::");
            for (at, _) in source.code.match_indices(&prefix) {
                let item = words(&source.code[at + prefix.len()..]).next().unwrap_or_default();
                let is_constant = !item.contains(|c: char| c.is_ascii_lowercase());
                let is_free = *name == "libc" && (is_constant || LIBC_TYPES.contains(&item));
                let is_own_module = source.code[..at].ends_with(|c| is_word(c) || c == ':');
                if module != Some("sys") && !is_free && !is_own_module {
                    let line = source.line_of(at);
                    violations.push(format!("{root}{}:{line}: {name}::{item}", source.name));
                }
            }
        }
        for (at, _) in source.code.match_indices("tikv_jemalloc_sys") {
            if module != Some("heap") {
                let line = source.line_of(at);
                violations.push(format!("{root}{}:{line}: jemalloc", source.name));
            }
        }
    }
    report("system calls belong into `sys`, jemalloc's into src/heap", &violations);
}

#[test]
fn test_modules_are_compiled_for_tests_only() {
    let mut violations = Vec::new();
    for source in libraries().into_iter().flat_map(|(_, sources)| sources) {
        for module in TEST_MODULES {
            let declaration = format!("mod {module};");
            for (at, _) in source.code.match_indices(&declaration) {
                let attributes = source.code[..at].rsplit([';', '}']).next().unwrap_or_default();
                if !attributes.contains("#[cfg(test)]") {
                    violations.push(format!("{}:{}", source.name, source.line_of(at)));
                }
            }
        }
    }
    report("`mod tests` and `mod testing` are under #[cfg(test)]", &violations);
}

#[test]
fn files_are_short() {
    let long = everything().into_iter().filter_map(|source| {
        let lines = source.text.lines().count();
        (lines > FILE_LINES_MAX).then(|| format!("{}: {lines} lines", source.name))
    });
    report("files of at most 800 lines", &long.collect::<Vec<_>>());
}

#[test]
fn functions_are_short() {
    let mut listed = String::new();
    let mut violations = Vec::new();
    for source in everything() {
        for function in source.functions() {
            let (lines, name) = (function.lines, function.name);
            let entry = format!("{}:{}: `{name}` has {lines} lines", source.name, function.line);
            if lines > FUNCTION_LINES_MAX {
                violations.push(entry);
            } else if lines > FUNCTION_LINES_LONG {
                writeln!(listed, "  {entry}").expect("a string takes any text");
            }
        }
    }
    if !listed.is_empty() {
        println!("functions longer than the {FUNCTION_LINES_LONG} lines aimed at:\n{listed}");
    }
    report("functions of at most 100 lines", &violations);
}

/// Set to anything, a test writes what it checks: `BLESS=1 cargo test --test tidy`.
const BLESS: &str = "BLESS";

/// The reason that a source gives for its unsafe code.
fn unsafe_reason(source: &Source) -> Option<&str> {
    let (_, attribute) = source.text.split_once("#![expect(unsafe_code,")?;
    let (_, reason) = attribute.split_once("reason = \"")?;
    reason.split('"').next()
}

#[test]
fn unsafe_code_is_announced_and_listed() {
    let mut violations = Vec::new();
    let mut rows = String::new();
    for source in everything().iter().filter(|source| source.has_word("unsafe")) {
        match unsafe_reason(source) {
            None => violations.push(format!("{}: no `#![expect(unsafe_code, ..)]`", source.name)),
            Some(_) if is_test(&source.name) => {}
            Some(reason) => writeln!(rows, "| `{}` | {reason} |", source.name).expect("a string"),
        }
    }
    let path = root().join("docs/unsafe.md");
    let page = fs::read_to_string(&path).expect("the page");
    let (head, listed) = page.split_once("|---|---|\n").expect("a table");
    if listed != rows {
        if std::env::var_os(BLESS).is_some() {
            fs::write(&path, format!("{head}|---|---|\n{rows}")).expect("a writable page");
        } else {
            violations.push(format!("docs/unsafe.md is old: {BLESS}=1 cargo test --test tidy"));
        }
    }
    report("unsafe code is announced and listed", &violations);
}

/// The rows of the tables in a part of a page, as cells.
fn table_rows(part: &str) -> impl Iterator<Item = Vec<&str>> {
    let rows = part.lines().filter(|line| line.starts_with("| ") && !line.starts_with("|-"));
    rows.map(|row| row.trim_matches('|').split(" | ").collect())
}

/// What stands between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn the_walks_of_the_architecture_name_functions_where_they_are() {
    let page =
        fs::read_to_string(root().join("book/src/design/architecture.md")).expect("the page");
    let (_, walks) = page.split_once("The same fault as functions").expect("the first walk");
    let (walks, _) = walks.split_once("\n## One limit").expect("what follows the last walk");
    let library = library();
    let mut violations = Vec::new();
    let mut functions = 0;
    for row in table_rows(walks).filter(|row| row.len() == 3) {
        let mut code = String::new();
        for file in quoted(row[1]) {
            // Those of a fault are named from `src/paging`, for brevity.
            let paths = [format!("src/{file}"), format!("src/paging/{file}")];
            let found = library.iter().filter(|source| {
                paths.iter().any(|path| {
                    source.name == *path || path.ends_with('/') && source.name.starts_with(path)
                })
            });
            let before = code.len();
            found.for_each(|source| code += &source.code);
            if code.len() == before {
                violations.push(format!("there is no {file}"));
            }
        }
        for name in quoted(row[2]) {
            functions += 1;
            let name = name.rsplit("::").next().unwrap_or(name);
            if !code.contains(&format!("fn {name}(")) && !code.contains(&format!("fn {name}<")) {
                violations.push(format!("`{name}` is not in {}", row[1]));
            }
        }
    }
    assert!(functions > 50, "{functions} functions: the page was not understood");
    report("book/src/design/architecture.md names what there is", &violations);
}

#[test]
fn every_unsafe_block_has_a_safety_comment() {
    let mut violations = Vec::new();
    for source in everything() {
        let text: Vec<&str> = source.text.lines().collect();
        let code: Vec<&str> = source.code.lines().collect();
        let opens = |line: &str| line.contains("unsafe {") || line.contains("unsafe impl ");
        for (index, _) in code.iter().enumerate().filter(|(_, line)| opens(line)) {
            let above = (index.saturating_sub(SAFETY_REACH)..=index).rev();
            // Up to the block before: one comment does not serve two blocks.
            let mut own = above.take_while(|&line| line == index || !opens(code[line]));
            if !own.any(|line| text[line].contains("SAFETY:")) {
                violations.push(format!("{}:{}", source.name, index + 1));
            }
        }
    }
    report("unsafe blocks are preceded by `// SAFETY:`", &violations);
}

/// Wordings that have to be read twice, and what to write instead.
const WORDINGS: &[(&str, &str)] = &[
    ("whoever", "the holder, the caller, a thread that"),
    ("to be had", "available, free, timed out"),
    ("so many", "this number of, 1/N of"),
    ("/// Most ", "Maximum number of"),
    ("// Who ", "name the subject"),
    ("// Whom ", "name the subject"),
    ("who asks", "the caller"),
    ("who waits", "a thread that waits"),
    ("who holds", "the holder"),
];

#[test]
fn english_is_plain() {
    let mut violations = Vec::new();
    for source in everything().iter().filter(|source| !source.name.starts_with("tests/tidy")) {
        for (number, line) in source.text.lines().enumerate() {
            for (wording, better) in WORDINGS.iter().filter(|(wording, _)| line.contains(wording)) {
                let place = format!("{}:{}", source.name, number + 1);
                violations.push(format!("{place}: `{}`, better: {better}", wording.trim()));
            }
        }
    }
    report("plain English", &violations);
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, so that this file does not contain them.
    let macros = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!")];
    let notes = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];
    let mut violations = Vec::new();
    for source in everything() {
        let in_code = macros.iter().flat_map(|word| source.code.match_indices(word));
        let in_text = notes.iter().flat_map(|word| source.text.match_indices(word));
        for (at, word) in in_code.chain(in_text) {
            violations.push(format!("{}:{}: {word}", source.name, source.line_of(at)));
        }
    }
    report("no unfinished code", &violations);
}

#[test]
fn the_library_never_unwraps_without_a_reason() {
    let mut violations = Vec::new();
    for source in sources(&[SHIPPED, &["papers/src"]].concat()) {
        for (at, _) in source.code.match_indices(".unwrap()") {
            violations.push(format!("{}:{}", source.name, source.line_of(at)));
        }
    }
    report("`expect` with the reason, not `unwrap`", &violations);
}

#[test]
fn the_rules_see_through_text_that_imitates_code() {
    let text = r##"
        // crate::heap::X and unsafe { } in a comment
        /* crate::heap::Y /* nested */ unsafe */
        const A: &str = "crate::heap \" unsafe {";
        const B: &str = r#"unsafe " {"#;
        const C: char = '"';
        const D: char = '\'';
        fn real<'a>(x: &'a [u8; 3]) -> usize {
            x.len() // }
        }
        fn declared();
        fn after() { let unsafe_code = '{'; }
    "##;
    let source = Source::new("src/base/x.rs", text.to_owned());
    assert!(!source.code.contains("crate::"), "{}", source.code);
    assert!(!source.has_word("unsafe"), "{}", source.code);
    let functions = source.functions();
    let found: Vec<_> = functions.iter().map(|f| (f.name, f.line, f.lines)).collect();
    assert_eq!(found, [("real", 8, 3), ("after", 12, 1)]);
}

#[test]
fn used_modules_are_found_in_paths_and_in_braces() {
    let names = |code| crate_names(code, 0);
    assert_eq!(names("crate::base::sync::Rank"), ["base"]);
    assert_eq!(names("crate::{base::{a, heap}, sys::vm, Error}"), ["base", "sys", "Error"]);
    assert_eq!(names("crate::{\n    base::units,\n    store::Op,\n};\nx::y"), ["base", "store"]);
    assert_eq!(names("crate::Error> {"), ["Error"]);
}

/// The front page is read where the repository is not: its programs are copied into new packages,
/// and its links are followed from the crate's documentation.
#[test]
fn the_front_page_stands_alone() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let links = fs::read_to_string(root().join("book/links.md")).expect("the links");
    /// Where the pages of the book are once the crate is published.
    const PAGES: &str = "https://docs.rs/farheap/latest/farheap/book/";
    const LINES_MAX: usize = 150;
    let mut violations = Vec::new();
    if readme.lines().count() > LINES_MAX {
        violations.push(format!("it has more than {LINES_MAX} lines"));
    }
    let first = fs::read_to_string(root().join("examples/first.rs")).expect("the first program");
    let (_, program) = first.split_once("\n\n").expect("its documentation comes first");
    if !readme.contains(program.trim_end()) {
        violations.push("its first program is not examples/first.rs".to_owned());
    }
    let (mut rust, mut fence) = (false, false);
    for line in readme.lines() {
        let code = line.trim_start();
        if let Some(language) = code.strip_prefix("```") {
            fence = !fence;
            rust = fence && language.starts_with("rust");
        } else if rust && let Some(path) = code.strip_prefix("use ") {
            if !["farheap::", "std::"].iter().any(|known| path.starts_with(known)) {
                violations.push(format!("needs another crate: {line}"));
            }
        } else if rust && code.contains("tempfile::") {
            violations.push(format!("needs another crate: {line}"));
        } else if !fence {
            violations.extend(
                inline_links(line)
                    .filter(|link| {
                        !(link.starts_with("http") || link.starts_with('#') || link.contains("::"))
                    })
                    .map(|link| format!("`{link}` is no file of the documentation")),
            );
        }
        // A page is linked by a definition, for readers elsewhere, which `lib.rs` replaces.
        if let Some((name, link)) = line.split_once("]: ").filter(|_| line.starts_with('[')) {
            let page = link.strip_prefix(PAGES).and_then(|rest| rest.strip_suffix("/index.html"));
            if page != Some(name.trim_start_matches('[')) {
                violations.push(format!("{link} is not the page {name}]"));
            }
            if !links.contains(&format!("{name}]: crate::book::")) {
                violations.push(format!("{name}] is no page of the book"));
            }
        }
    }
    report("README.md is the documentation's front page", &violations);
}

/// The targets of links written `[text](target)`.
fn inline_links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
}

/// The tests from outside tell in their heads which guarantees they hold, by the numbers of README.md; each
/// guarantee has some.
#[test]
fn guarantees_have_tests_and_tests_have_guarantees() {
    const FOLDERS: &[&str] =
        &["tests/global", "tests/heap", "tests/limit", "tests/pool", "tests/region"];
    const GUARANTEES: u32 = 10;
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let number = |line: &str| line.split_once(". ").and_then(|(number, _)| number.parse().ok());
    assert_eq!(readme.lines().filter_map(number).max(), Some(GUARANTEES), "the list in README.md");
    let (mut held, mut violations) = (Vec::new(), Vec::new());
    for source in sources(FOLDERS).iter().filter(|source| !source.name.ends_with("/main.rs")) {
        match source.text.lines().find_map(|line| line.strip_prefix("//! Guards: ")) {
            Some("the interface.") => {}
            Some(list) => held.extend(list.trim_end_matches('.').split(", ").map(str::to_owned)),
            None if source.name.matches('/').count() > 2 => {} // A part of another file.
            None => violations.push(format!("{} does not tell what it guards", source.name)),
        }
    }
    let names: Vec<String> = (1..=GUARANTEES).map(|number| format!("G{number}")).collect();
    let missing = names.iter().filter(|name| !held.contains(name));
    violations.extend(missing.map(|name| format!("{name} has no test")));
    let unknown = held.iter().filter(|name| !names.contains(name));
    violations.extend(unknown.map(|name| format!("{name} is no guarantee")));
    report("guarantees have tests, and tests have guarantees", &violations);
}

/// Words that no summary begins with: it has to be read twice.
const BEGINNINGS: &[(&str, &str)] = &[
    (" What ", "the noun that it stands for"),
    (" Whether ", "True if"),
    (" Has ", "the verb of what happens"),
];

/// Documentation begins with a noun or a verb.
#[test]
fn summaries_begin_with_a_noun_or_a_verb() {
    let mut violations = Vec::new();
    for source in sources(SHIPPED) {
        let mut before = "";
        for (at, line) in source.text.lines().enumerate() {
            let line = line.trim_start();
            let is_doc = |line: &str| line.starts_with("///") || line.starts_with("//!");
            let begins = !is_doc(before) || matches!(before, "///" | "//!");
            let text = line.trim_start_matches("///").trim_start_matches("//!");
            let bad = BEGINNINGS.iter().find(|(word, _)| text.starts_with(word));
            if let Some((_, better)) = bad.filter(|_| is_doc(line) && begins) {
                violations.push(format!("{}:{}: {line}: better: {better}", source.name, at + 1));
            }
            before = line;
        }
    }
    report("summaries begin with a noun or a verb", &violations);
}
