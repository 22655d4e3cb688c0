//! The header, the library's symbols and the Rust functions say the same.

mod common;

use common::{
    C, build_dir, crate_dir, declared, installed, library, sources_are_readable, succeed,
};
use farheap_ffi::{config, stats};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::process::Command;

/// The sources of the crate, comments left out.
fn sources() -> String {
    let files = fs::read_dir(crate_dir().join("src")).expect("a directory");
    let mut text = String::new();
    for file in files {
        let source = fs::read_to_string(file.expect("an entry").path()).expect("a source");
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// A Rust type as C writes it.
fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(to) = rust.strip_prefix("*const ") {
        let to = c_type(to);
        return if to.ends_with('*') { format!("{to} const *") } else { format!("const {to} *") };
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(to));
    }
    let plain = match rust {
        "usize" => "size_t",
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "f64" => "double",
        "bool" => "bool",
        "c_int" => "int",
        "c_char" => "char",
        "c_void" | "()" => "void",
        other => other.rsplit("::").next().expect("a name has a last part"),
    };
    plain.to_owned()
}

/// The element's type and the length of an array's.
fn array(kind: &str) -> Option<(&str, &str)> {
    kind.strip_prefix('[')?.strip_suffix(']')?.split_once("; ")
}

/// Parameters and result of each exported function, in C.
type Functions = BTreeMap<String, (Vec<String>, String)>;

fn parameters(list: &str) -> Vec<String> {
    let list = list.trim().trim_end_matches(',');
    let parts = list.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| c_type(part.split_once(':').expect("a name and a type").1)).collect()
}

/// Functions written out, and those that the macros of the crate write.
fn functions(code: &str) -> Functions {
    let mut found = Functions::new();
    for (at, _) in code.match_indices("extern \"C\" fn far") {
        let rest = &code[at + "extern \"C\" fn ".len()..];
        let (name, rest) = rest.split_once('(').expect("a function has parameters");
        let (list, rest) = rest.split_once(')').expect("the parameters end");
        let head = rest.split_once('{').expect("a function has a body").0;
        let result = head.trim().strip_prefix("->").map_or("void".to_owned(), c_type);
        found.insert(name.to_owned(), (parameters(list), result));
    }
    // Macro, its first and last parameter, its result.
    let mut uses = Vec::new();
    for (macro_use, first, last, result) in [
        ("of_collective! {", "const farheap_collective *", "", ""),
        ("of_account! {", "const farheap_account *", "", ""),
        ("fixes! {", "farheap_pool *", "farheap_page *", "farheap_status"),
    ] {
        let from = code.find(&format!("\n{macro_use}")).expect("the macro is used");
        uses.push((from, first.to_owned(), last, result));
    }
    for (from, macro_use) in code.match_indices("\nmethods! { ") {
        let (handle, _) = code[from + macro_use.len()..].split_once(':').expect("a type");
        uses.push((from, format!("{handle} *"), "", "farheap_status"));
    }
    assert_eq!(uses.len(), 8, "uses of macros that write functions");
    for (from, first, last, result) in uses {
        let body = &code[from..from + code[from..].find("\n}").expect("the use ends")];
        for (at, _) in body.match_indices("\n    farheap_") {
            let (name, rest) = body[at + 5..].split_once('(').expect("parameters");
            let (list, rest) = rest.split_once(')').expect("the parameters end");
            // The first is the object's name.
            let rest_of_list = list.split_once(',').map_or("", |(_, rest)| rest);
            let mut types = vec![first.clone()];
            types.extend(parameters(rest_of_list));
            types.extend((!last.is_empty()).then(|| last.to_owned()));
            let own = rest
                .trim_start()
                .strip_prefix("->")
                .map(|rest| c_type(rest.split('=').next().expect("a result")));
            found.insert(name.to_owned(), (types, own.unwrap_or_else(|| result.to_owned())));
        }
    }
    found
}

/// Structures with the names and types of their fields.
fn structures(code: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("pub struct farheap_") {
        let rest = &code[at + "pub struct ".len()..];
        let (name, rest) = rest.split_once(" {").expect("a structure has fields");
        if name == "farheap_config" {
            continue; // It follows from a table, see below.
        }
        let body = rest.split_once("\n}").expect("the structure ends").0;
        let fields = body.lines().filter_map(|line| line.trim().strip_prefix("pub "));
        let fields: Vec<_> = fields
            .map(|field| {
                let (name, kind) = field.trim_end_matches(',').split_once(": ").expect("a type");
                (name.to_owned(), kind.to_owned())
            })
            .collect();
        // Handles have no fields that C knows.
        if !fields.is_empty() {
            found.push((name.to_owned(), fields));
        }
    }
    found
}

/// Constants with their values.
fn constants(code: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for line in code.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("pub const FARHEAP_") {
            let (name, rest) = rest.split_once(':').expect("a constant has a type");
            let value = rest.split_once("= ").expect("a value").1.trim_end_matches(';');
            let value = value.replace('_', "").replace("u64::MAX", "UINT64_MAX");
            let value = value.replace("u32::MAX", "UINT32_MAX");
            found.push((format!("FARHEAP_{name}"), value));
        } else if let Some((name, value)) = line.split_once(" = ")
            && name.starts_with("FARHEAP_")
            && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
        {
            found.push((name.to_owned(), value.trim_end_matches(',').to_owned()));
        }
    }
    found
}

/// What a built library exports.
fn exported(extension: &str, options: &[&str]) -> BTreeSet<String> {
    let output = succeed(Command::new("nm").args(options).arg(library(extension)));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.split_whitespace().last());
    names.map(str::to_owned).collect()
}

#[test]
fn the_header_declares_exactly_what_the_libraries_export() {
    if !sources_are_readable() {
        return;
    }
    if Command::new("nm").arg("--version").output().is_err() {
        println!("skipped: nm is not installed");
        return;
    }
    let declared = declared();
    assert!(declared.len() > 100, "{} functions: the header was not understood", declared.len());
    let in_rust: BTreeSet<String> = functions(&sources()).into_keys().collect();
    assert_eq!(declared, in_rust, "header and Rust sources");
    let shared = exported("so", &["-D", "--defined-only"]);
    assert_eq!(declared, shared, "header and shared library, which exports nothing else");
    let in_static = exported("a", &["-g", "--defined-only"]);
    assert!(declared.is_subset(&in_static), "header and static library");
}

#[test]
fn types_and_values_are_the_same_on_both_sides() {
    if !sources_are_readable() {
        return;
    }
    let code = sources();
    let mut check = "#include \"farheap.h\"\n#include <stddef.h>\n".to_owned();
    let mut line = |text: String| writeln!(check, "{text}").expect("a string takes any text");
    for (name, (types, result)) in functions(&code) {
        let types = if types.is_empty() { "void".to_owned() } else { types.join(", ") };
        line(format!("{result} (*const check_{name})({types}) = {name};"));
    }
    for (name, value) in constants(&code) {
        line(format!("_Static_assert({name} == {value}, \"{name}\");"));
    }
    for (name, fields) in structures(&code) {
        line(format!("struct rust_{name} {{"));
        for (field, kind) in &fields {
            match array(kind) {
                Some((of, count)) => line(format!("    {} {field}[{count}];", c_type(of))),
                None => line(format!("    {} {field};", c_type(kind))),
            }
        }
        line("};".to_owned());
        line(format!("_Static_assert(sizeof({name}) == sizeof(struct rust_{name}), \"size\");"));
        for (field, _) in &fields {
            let here = format!("offsetof({name}, {field})");
            let there = format!("offsetof(struct rust_{name}, {field})");
            line(format!("_Static_assert({here} == {there}, \"{name}.{field}\");"));
        }
    }
    for (_, name, offset, _) in config::fields() {
        let here = format!("offsetof(farheap_config, {name})");
        writeln!(check, "_Static_assert({here} == {offset}, \"farheap_config.{name}\");")
            .expect("a string takes any text");
    }
    let mut sizes = vec![("farheap_config", size_of::<config::farheap_config>())];
    for stats::Structure { name: of, size, fields } in stats::structures() {
        sizes.push((of, size));
        for stats::Field { name, offset, .. } in fields {
            let here = format!("offsetof({of}, {name})");
            writeln!(check, "_Static_assert({here} == {offset}, \"{of}.{name}\");")
                .expect("a string takes any text");
        }
    }
    for (name, size) in sizes {
        writeln!(check, "_Static_assert(sizeof({name}) == {size}, \"{name}\");")
            .expect("a string takes any text");
    }
    assert!(check.matches("check_far").count() > 100, "the sources were not understood");
    let dir = tempfile::tempdir().expect("a directory");
    let source = dir.path().join("check.c");
    fs::write(&source, &check).expect("room");
    for compiler in installed(C) {
        let mut command = compiler.command();
        command.arg("-c").arg(&source).arg("-o").arg(dir.path().join("check.o"));
        succeed(&mut command);
    }
}

/// A comment in lines of at most 100 characters.
fn comment_lines(text: &str) -> String {
    let mut lines = "    /*".to_owned();
    let mut len = lines.len();
    for word in text.split(' ').chain(["*/"]) {
        if len + 1 + word.len() > 100 {
            lines += "\n     *";
            len = 6;
        }
        lines += " ";
        lines += word;
        len += 1 + word.len();
    }
    lines + "\n"
}

/// The structure of options as the header should have it.
fn config_structure() -> String {
    let mut text = "typedef struct farheap_config {\n".to_owned();
    text += "    /* sizeof(farheap_config) */\n    size_t size;\n";
    text += "    /* instead of limit: its share of memory, 1 to 100 */\n";
    text += "    uint64_t limit_percent;\n";
    let mut values = vec!["sizeof(farheap_config)", "0"];
    let documentation = farheap::config::documentation();
    for ((kind, name, _, what), [_, range, default, _]) in
        config::fields().iter().zip(documentation)
    {
        let range = match *kind {
            "farheap_switch " => String::new(),
            _ => format!("{range}; "),
        };
        let comment = format!("{what}; {range}default {default}").replace(['`', '*'], "");
        text += &comment_lines(&comment);
        writeln!(text, "    {kind}{name};").expect("a string takes any text");
        values.push(if kind.starts_with("farheap_switch") { "FARHEAP_DEFAULT" } else { "0" });
    }
    text += "} farheap_config;\n\n#define FARHEAP_CONFIG_INIT \\\n    { ";
    let mut line = 6;
    for (at, value) in values.iter().enumerate() {
        if line + value.len() > 90 {
            text += "\\\n      ";
            line = 6;
        }
        text += value;
        text += if at + 1 < values.len() { ", " } else { " }\n" };
        line += value.len() + 2;
    }
    text
}

/// A structure of statistics as the header should have it.
fn stats_structure(stats::Structure { name: of, fields, .. }: &stats::Structure) -> String {
    let mut text = format!("typedef struct {of} {{\n");
    text += &format!("    /* sizeof({of}) */\n    size_t size;\n");
    for stats::Field { name, kind, documentation, .. } in fields {
        text += &comment_lines(documentation.replace('`', "").trim());
        text += &match array(kind) {
            Some((kind, count)) => format!("    {} {name}[{count}];\n", c_type(kind)),
            None => format!("    {} {name};\n", c_type(kind)),
        };
    }
    text + &format!("}} {of};\n")
}

/// `FARHEAP_WRITE=1 cargo test -p farheap-ffi --test header` writes the structures into the header.
#[test]
fn the_header_has_the_structures_that_the_tables_of_the_library_say() {
    if !sources_are_readable() {
        return;
    }
    let path = crate_dir().join("include/farheap.h");
    let header = fs::read_to_string(&path).expect("the header");
    let mut expected = header.clone();
    let mut structures =
        vec![("farheap_config", "FARHEAP_DEFAULT }\n".to_owned(), config_structure())];
    structures.extend(stats::structures().iter().map(|structure| {
        (structure.name, format!("}} {};\n", structure.name), stats_structure(structure))
    }));
    for (name, last, structure) in structures {
        let first = format!("typedef struct {name} {{");
        let begin = expected.find(&first).expect("the structure");
        let end = begin + expected[begin..].find(&last).expect("the structure ends") + last.len();
        expected.replace_range(begin..end, &structure);
    }
    if std::env::var_os("FARHEAP_WRITE").is_some() {
        fs::write(&path, expected).expect("the header can be written");
    } else {
        let hint = "FARHEAP_WRITE=1 cargo test -p farheap-ffi --test header the_header_has";
        assert!(header == expected, "`{hint}` writes what farheap.h should have");
    }
}

#[test]
fn the_soname_is_that_of_the_abi() {
    if Command::new("readelf").arg("--version").output().is_err() {
        println!("skipped: readelf is not installed");
        return;
    }
    let output = succeed(Command::new("readelf").arg("-d").arg(library("so")));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = farheap_ffi::abi::FARHEAP_ABI_VERSION;
    let soname = format!("[libfarheap.so.{version}]");
    assert!(text.contains(&soname), "{soname} of {:?}:\n{text}", build_dir());
}
