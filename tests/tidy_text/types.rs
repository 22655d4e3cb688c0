//! Names of types, and functions by the type of a parameter.

use super::{Source, words};

/// The types that a source declares, with their lines, but for those of its test modules.
pub(crate) fn types(source: &Source) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut is_for_tests, mut is_inside) = (false, false);
    for (at, line) in source.code.lines().enumerate() {
        if line.starts_with("#[cfg(") {
            is_for_tests = line.contains("test") || line.contains("loom");
        } else if line.starts_with("mod ") && line.ends_with('{') {
            is_inside = is_for_tests;
        } else if line == "}" {
            is_inside = false;
        }
        if !line.starts_with('#') {
            is_for_tests = false;
        }
        found.extend(declared(line).filter(|_| !is_inside).map(|name| (at + 1, name)));
    }
    found
}

/// The type that a line declares. An indented `type` belongs to a trait or to an implementation.
fn declared(line: &str) -> Option<&str> {
    let item = line.trim_start();
    let item = match item.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => item.strip_prefix("pub ").unwrap_or(item),
    };
    let (kind, rest) = item.strip_prefix("unsafe ").unwrap_or(item).split_once(' ')?;
    let is_type = matches!(kind, "struct" | "enum" | "trait" | "union")
        || kind == "type" && !line.starts_with(' ');
    // (A macro's parameter is no name.)
    words(rest).next().filter(|_| is_type && rest.starts_with(char::is_uppercase))
}

/// The functions of a source that take a reference to `what`, or to an `Arc` of it, with their lines.
pub(crate) fn takers<'a>(source: &'a Source, what: &str) -> Vec<(usize, &'a str)> {
    let by_reference = [format!("&{what}"), format!("&Arc<{what}>")];
    let mut found = Vec::new();
    for (at, _) in source.code.match_indices("fn ") {
        let rest = &source.code[at + 3..];
        let signature = &rest[..rest.find(['{', ';']).unwrap_or(rest.len())];
        let parameters = signature.split("->").next().unwrap_or_default();
        let takes = |kind: &String| {
            let mut places = parameters.match_indices(kind.as_str());
            places.any(|(at, _)| !parameters[at + kind.len()..].starts_with(char::is_alphanumeric))
        };
        if by_reference.iter().any(takes) {
            let name = words(rest).next().unwrap_or_default();
            found.push((source.line_of(at), name));
        }
    }
    found
}

#[test]
fn declared_types_are_told_from_others() {
    let code = "pub(in crate::a) struct A;\nunsafe trait B {\n    type C;\n}\n    struct D(u8);\n\
                type E<'a> = &'a u8;\npub union F {\n}\nstruct $Name;\n#[cfg(all(test, loom))]\n\
                mod model {\n    struct G;\n}\n#[cfg(not(loom))]\nmod h;\nenum I {\n}\n";
    let source = Source::new("src/a.rs", code.to_owned());
    let found: Vec<&str> = types(&source).into_iter().map(|(_, name)| name).collect();
    assert_eq!(found, ["A", "B", "D", "E", "F", "I"]);
}

#[test]
fn functions_are_found_by_the_type_that_they_take() {
    let code = "fn a(pager: &Pager) {}\nfn b(\n    x: u8,\n    y: &Arc<Pager>,\n) -> u8 {}\n\
                fn c(pager: Arc<Pager>) {}\nfn d(&self) -> &Pager {}\nfn e(f: impl Fn(&Pager)) {}\n\
                fn f(&self, of: &PagerOfOthers) {}\n";
    let source = Source::new("src/a.rs", code.to_owned());
    let found: Vec<&str> = takers(&source, "Pager").into_iter().map(|(_, name)| name).collect();
    assert_eq!(found, ["a", "b", "e"]);
}
