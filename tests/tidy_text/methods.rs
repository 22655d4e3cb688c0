//! How many methods a type has, whatever files they are in.

use super::{Source, is_word, words};
use std::collections::BTreeMap;

/// The methods of each type that are no trait's, by the top-level module and the name of the type.
pub(crate) fn methods_of_types(sources: &[Source]) -> BTreeMap<(String, String), usize> {
    let mut found = BTreeMap::new();
    for source in sources {
        let code = without_tests(source);
        for (at, _) in code.match_indices("impl") {
            let is_keyword =
                !code[..at].ends_with(is_word) && code[at + 4..].starts_with([' ', '<']);
            // Not the type `impl Trait`.
            let is_item = code[..at].trim_end_matches("unsafe ").ends_with('\n');
            let Some(open) = code[at..].find('{').filter(|_| is_keyword && is_item) else {
                continue;
            };
            if let Some(name) = inherent_type(&code[at + 4..at + open]) {
                let key = (module(&source.name), name.to_owned());
                *found.entry(key).or_default() += functions_of(&code[at + open + 1..]);
            }
        }
    }
    found
}

/// The code before the unit tests, which are at the end.
fn without_tests(source: &Source) -> &str {
    source.code.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default()
}

/// `src/pool/latch/models.rs` is of `pool`, `ffi/src/heap.rs` of `ffi`.
fn module(name: &str) -> String {
    let below = name.strip_prefix("src/").unwrap_or(name);
    below.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned()
}

/// The type of an inherent `impl`, from what stands between that word and the brace; `None` for a trait's.
fn inherent_type(head: &str) -> Option<&str> {
    let mut rest = head.trim_start();
    if rest.starts_with('<') {
        let mut depth = 0;
        let closed = rest.char_indices().find_map(|(index, c)| {
            let is_arrow = rest[..index].ends_with('-');
            depth += i32::from(c == '<') - i32::from(c == '>' && !is_arrow);
            (depth == 0).then_some(index)
        });
        rest = &rest[closed? + 1..];
    }
    let rest = rest.split(" where").next().unwrap_or_default();
    let is_of_trait = rest.contains(" for ");
    words(rest).next().filter(|_| !is_of_trait)
}

/// The functions of a block's first level, from behind its opening brace.
fn functions_of(body: &str) -> usize {
    let mut depth = 0;
    let mut count = 0;
    for (index, c) in body.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            'f' if depth == 0 && body[index..].starts_with("fn ") => {
                count += usize::from(!body[..index].ends_with(is_word));
            }
            _ => {}
        }
    }
    count
}
