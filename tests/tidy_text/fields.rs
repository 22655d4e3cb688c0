//! Which fields of structs can be named outside the folder that their struct lives in.

use crate::tidy_text::Source;

/// Types whose values change through a shared reference, or that own memory: a struct with one of
/// them guards something, so it is no plain data.
const GUARDING: &[&str] =
    &["Atomic", "Ranked<", "FaultLock<", "Mutex<", "LazyArray<", "Mapping", "Cell<", "NonNull<"];

/// A field as it is declared.
struct Field<'a> {
    name: &'a str,
    /// What `pub(..)` says: empty for private fields, `pub` for public ones.
    visibility: &'a str,
    kind: &'a str,
}

/// The text up to the bracket that closes one opened before `text`, and what follows.
fn inside(text: &str) -> (&str, &str) {
    let mut depth = 1;
    for (index, c) in text.char_indices() {
        match c {
            '{' | '(' => depth += 1,
            '}' | ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return text.split_at(index);
        }
    }
    (text, "")
}

/// The fields of a struct with names, from the text between its braces.
fn fields(body: &str) -> Vec<Field<'_>> {
    let mut found = Vec::new();
    for line in body.lines().map(str::trim).filter(|line| !line.starts_with("#[")) {
        let (visibility, rest) = match line.strip_prefix("pub(") {
            Some(rest) => rest.split_once(") ").unwrap_or(("", rest)),
            None => match line.strip_prefix("pub ") {
                Some(rest) => ("pub", rest),
                None => ("", line),
            },
        };
        let Some((name, kind)) = rest.split_once(": ") else { continue };
        if name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') {
            found.push(Field { name, visibility, kind });
        }
    }
    found
}

/// The folder of a source, as a module path: `src/paging/page/word.rs` lies in `paging::page`.
fn folder(name: &str) -> String {
    let below = name.strip_prefix("src/").unwrap_or(name);
    below.rsplit_once('/').map_or(String::new(), |(folder, _)| folder.replace('/', "::"))
}

/// Whether a visibility ends at the folder of the source.
fn stays_inside(source: &str, visibility: &str) -> bool {
    match visibility {
        "" => true,
        "super" => !source.ends_with("/mod.rs"),
        _ => visibility.strip_prefix("in crate::").is_some_and(|path| {
            let folder = folder(source);
            path == folder || path.starts_with(&format!("{folder}::"))
        }),
    }
}

/// A struct with named fields, but for those of test modules.
struct Struct<'a> {
    name: &'a str,
    line: usize,
    fields: Vec<Field<'a>>,
}

impl Struct<'_> {
    /// Plain data: it shows all of its fields and guards nothing, or its fields are the rows of a
    /// macro's table, with a default each, as settings are.
    fn is_data(&self) -> bool {
        let guards = |field: &Field<'_>| GUARDING.iter().any(|kind| field.kind.contains(kind));
        let is_shown = self.fields.iter().all(|field| !field.visibility.is_empty());
        let is_table = self.fields.iter().all(|field| field.kind.contains(" = "));
        is_table || (is_shown && !self.fields.iter().any(guards))
    }
}

fn structs(source: &Source) -> Vec<Struct<'_>> {
    let mut found = Vec::new();
    let code = source.code.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    for (at, _) in code.match_indices("struct ") {
        let head = &code[at + "struct ".len()..];
        let end = head.find(['{', ';', '(']).unwrap_or(head.len());
        let is_declared = code[..at].ends_with([' ', '\n']) && head[end..].starts_with('{');
        let Some(name) = head[..end].split(|c: char| !c.is_alphanumeric()).next() else { continue };
        if is_declared {
            let (body, _) = inside(&head[end + 1..]);
            found.push(Struct { name, line: source.line_of(at), fields: fields(body) });
        }
    }
    found
}

/// The fields of a source that are visible outside its folder, as `struct.field`. Plain data may show
/// them.
pub(crate) fn open_fields(source: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for of in structs(source).iter().filter(|of| !of.is_data()) {
        let open = of.fields.iter().filter(|field| !stays_inside(&source.name, field.visibility));
        found.extend(open.map(|field| (of.line, format!("{}.{}", of.name, field.name))));
    }
    found
}

/// The structs of a source with more than `max` fields, but for plain data, with their number of fields.
pub(crate) fn wide_structs(source: &Source, max: usize) -> Vec<(usize, String)> {
    let structs = structs(source);
    let wide = structs.iter().filter(|of| of.fields.len() > max && !of.is_data());
    wide.map(|of| (of.line, format!("`{}` has {} fields", of.name, of.fields.len()))).collect()
}

#[test]
fn open_fields_are_told_from_plain_data() {
    let code = "pub(crate) struct Data { pub(crate) a: u8, pub(crate) b: u8 }".replace(", ", ",\n")
        + "\nstruct Owner {\n    pub(super) a: u8,\n    pub(in crate::a) b: u8,\n    c: u8,\n}\n"
        + "struct Lock {\n    pub(crate) held: AtomicU32,\n}\n";
    let open = |name: &str| {
        let found = open_fields(&Source::new(name, code.clone()));
        found.into_iter().map(|(_, field)| field).collect::<Vec<_>>()
    };
    assert_eq!(open("src/a/b.rs"), ["Lock.held"]);
    assert_eq!(open("src/a/mod.rs"), ["Owner.a", "Lock.held"]);
    assert_eq!(open("src/a/b/mod.rs"), ["Owner.a", "Owner.b", "Lock.held"]);
}

#[test]
fn wide_types_are_told_from_plain_data() {
    let code = "pub struct Shown {\n    pub a: u8,\n    pub b: u8,\n}\n".to_owned()
        + "table! {\n    pub struct Settings {\n        a: value(u8) = 1,\n        b: maybe(u8) = None,\n    }\n}\n"
        + "struct Owner {\n    a: u8,\n    /// Why.\n    b: Vec<u8>,\n}\n"
        + "pub(crate) struct Lock {\n    pub(crate) a: u8,\n    pub(crate) b: AtomicU8,\n}\n";
    let source = Source::new("src/a.rs", code);
    let wide =
        |max| wide_structs(&source, max).into_iter().map(|(_, what)| what).collect::<Vec<_>>();
    assert_eq!(wide(1), ["`Owner` has 2 fields", "`Lock` has 2 fields"]);
    assert_eq!(wide(2), Vec::<String>::new());
}
