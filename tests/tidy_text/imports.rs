//! Which file of the library uses which other one, and the cycles among them.
//!
//! A path is followed through the modules it names and through re-exports to the file that has
//! the item. `mod x;` and `pub use x::Item` say where items are and are no use of them. Unit tests
//! are left out: they may look anywhere.

use super::{Source, is_word};
use std::collections::{BTreeMap, BTreeSet};

/// A module path below the crate's root, as in `["paging", "pager"]`.
type Module = Vec<String>;

/// The modules of a crate, each of which is one file.
pub(crate) struct Modules<'a> {
    files: BTreeMap<Module, File<'a>>,
}

struct File<'a> {
    name: &'a str,
    /// Paths that the file names, as written, with their offsets in its code.
    paths: Vec<(Module, usize)>,
    /// Names that the module re-exports, and the paths that they stand for.
    exports: BTreeMap<String, Module>,
}

impl<'a> Modules<'a> {
    /// Reads the sources of a crate whose root is `src/lib.rs`.
    pub(crate) fn new(sources: &'a [Source]) -> Modules<'a> {
        let files = sources.iter().map(|source| {
            let code = without_unit_tests(&source.code);
            let (paths, exports) = paths_of(&code);
            (module_path(&source.name), File { name: &source.name, paths, exports })
        });
        Modules { files: files.collect() }
    }

    /// For each file, the files that it uses.
    pub(crate) fn uses(&self) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
        let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (module, file) in &self.files {
            let targets = file.paths.iter().filter_map(|(path, _)| self.resolve(module, path, 0));
            let others: BTreeSet<&str> = targets.filter(|target| *target != file.name).collect();
            found.entry(file.name).or_default().extend(others);
        }
        found
    }

    /// The file that has what a path of `module` names; `None` for another crate's.
    fn resolve(&self, module: &[String], path: &[String], depth: usize) -> Option<&'a str> {
        /// Re-exports of re-exports that are followed; more is a cycle.
        const DEPTH_MAX: usize = 8;
        let mut at: Module = module.to_vec();
        let mut rest = path.iter();
        let mut is_relative = true;
        let mut pending = None;
        for segment in rest.by_ref() {
            match segment.as_str() {
                "crate" => at = Vec::new(),
                "self" => {}
                "super" => drop(at.pop()),
                name => {
                    pending = Some(name);
                    break;
                }
            }
            is_relative = false;
        }
        while let Some(name) = pending {
            let mut below = at.clone();
            below.push(name.to_owned());
            if self.files.contains_key(&below) {
                at = below;
                is_relative = false;
                pending = rest.next().map(String::as_str);
                continue;
            }
            let file = self.files.get(&at)?;
            if let Some(target) = file.exports.get(name).filter(|_| depth < DEPTH_MAX) {
                let target: Module = target.iter().chain(rest).cloned().collect();
                return self.resolve(&at, &target, depth + 1);
            }
            break;
        }
        // A name that no module begins: a local item or another crate.
        if is_relative { None } else { self.files.get(&at).map(|file| file.name) }
    }
}

/// Groups of files that use each other in a circle, among those that `belongs` names.
pub(crate) fn cycles<'a>(
    uses: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    belongs: impl Fn(&str) -> bool,
) -> Vec<Vec<&'a str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> = uses
        .keys()
        .filter(|file| belongs(file))
        .map(|file| (*file, reached(uses, file, &belongs)))
        .collect();
    let mut found: Vec<Vec<&str>> = Vec::new();
    for (file, targets) in &reach {
        if !targets.contains(file) || found.iter().flatten().any(|known| known == file) {
            continue;
        }
        let together = targets.iter().filter(|other| reach[**other].contains(file));
        found.push(together.copied().collect());
    }
    found
}

/// All files that `start` uses, directly or through others.
fn reached<'a>(
    uses: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    start: &str,
    belongs: impl Fn(&str) -> bool,
) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = vec![start];
    while let Some(file) = open.pop() {
        for next in uses.get(file).into_iter().flatten().filter(|next| belongs(next)) {
            if found.insert(*next) {
                open.push(next);
            }
        }
    }
    found
}

/// `src/paging/pager/mod.rs` and `src/paging/pager.rs` are `paging::pager`; `src/lib.rs` is the root.
fn module_path(name: &str) -> Module {
    let name = name.trim_start_matches("src/").trim_end_matches(".rs");
    let name = name.trim_end_matches("/mod");
    name.split('/').filter(|part| *part != "lib" && !part.is_empty()).map(str::to_owned).collect()
}

/// The code with every `#[cfg(test)] mod name { ... }` blanked out.
fn without_unit_tests(code: &str) -> String {
    let mut kept = code.to_owned();
    for (at, attribute) in code.match_indices("#[cfg(test)]") {
        let rest = code[at + attribute.len()..].trim_start();
        let body =
            rest.strip_prefix("mod ").and_then(|rest| rest.find(['{', ';']).map(|end| (rest, end)));
        let Some((rest, open)) = body.filter(|(rest, end)| rest[*end..].starts_with('{')) else {
            continue;
        };
        let start = code.len() - rest.len() + open;
        let mut depth = 0;
        let end = code[start..].char_indices().find_map(|(index, c)| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            (depth == 0).then_some(start + index)
        });
        let end = end.unwrap_or(code.len());
        kept.replace_range(start..end, &" ".repeat(end - start));
    }
    kept
}

/// The paths that code names, and its re-exports.
fn paths_of(code: &str) -> (Vec<(Module, usize)>, BTreeMap<String, Module>) {
    let mut paths = Vec::new();
    let mut exports = BTreeMap::new();
    let mut plain = code.to_owned();
    for (at, _) in code.match_indices("use ") {
        if code[..at].ends_with(is_word) {
            continue;
        }
        let Some(end) = code[at..].find(';') else { continue };
        let tree = &code[at + "use ".len()..at + end];
        let mut items = Vec::new();
        flatten(tree, &[], &mut items);
        if is_public(&code[..at]) {
            exports.extend(items.into_iter().filter_map(|(path, name)| Some((name?, path))));
        } else {
            paths.extend(items.into_iter().map(|(path, _)| (path, at)));
        }
        plain.replace_range(at..at + end, &" ".repeat(end));
    }
    paths.extend(inline_paths(&plain));
    (paths, exports)
}

/// Whether what precedes `use` makes it a re-export.
fn is_public(before: &str) -> bool {
    let before = before.trim_end();
    before.ends_with("pub")
        || before.ends_with(')')
            && before
                .rsplit("pub(")
                .next()
                .is_some_and(|inside| before.contains("pub(") && !inside.contains([';', '{', '}']))
}

/// Writes each path of a `use` tree to `found`, with the name it is known by.
fn flatten(tree: &str, prefix: &[String], found: &mut Vec<(Module, Option<String>)>) {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let head: Module = segments(&tree[..open]);
        let prefix: Module = prefix.iter().cloned().chain(head).collect();
        let inside = tree[open + 1..].trim_end().trim_end_matches('}');
        split_list(inside).into_iter().for_each(|part| flatten(part, &prefix, found));
        return;
    }
    let (path, alias) = match tree.split_once(" as ") {
        Some((path, alias)) => (path, Some(alias.trim().to_owned())),
        None => (tree, None),
    };
    let mut path: Module = prefix.iter().cloned().chain(segments(path)).collect();
    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
        path.pop();
    }
    let name = alias.or_else(|| path.last().cloned());
    if !path.is_empty() {
        found.push((path, name));
    }
}

/// The parts of a list in braces, at its own depth.
fn split_list(list: &str) -> Vec<&str> {
    let (mut depth, mut start) = (0, 0);
    let mut parts = Vec::new();
    for (index, c) in list.char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            parts.push(&list[start..index]);
            start = index + 1;
        }
    }
    parts.push(&list[start..]);
    parts.into_iter().filter(|part| !part.trim().is_empty()).collect()
}

fn segments(path: &str) -> Module {
    path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Paths with `::` outside of `use`.
fn inline_paths(code: &str) -> Vec<(Module, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(next) = code[at..].find("::") {
        let middle = at + next;
        let start = code[..middle].rfind(|c: char| !is_word(c)).map_or(0, |before| before + 1);
        let end = code[middle..]
            .find(|c: char| !is_word(c) && c != ':')
            .map_or(code.len(), |len| middle + len);
        let path = segments(&code[start..end]);
        if start < middle && !path.is_empty() {
            found.push((path, start));
        }
        at = end.max(middle + 2);
    }
    found
}
