//! Table 3: how many lines of code each variant adds to its container.
//!
//! Rule: code lines are lines that hold more than a comment. A variant's *added* lines are those of
//! the functions that the plain variant never calls and this one does, named below. *Changed*
//! are the lines outside of them that name the variant's strategy, or the predicate that it has in
//! common with others: where the plain code asks. *Deleted* are lines of the plain variant that this
//! one cannot use; strategies are chosen at run time, so there are none. The baseline are all code
//! lines of the container's files without the functions listed.

use std::collections::BTreeSet;

const BTREE: [&str; 7] = [
    include_str!("../../../collections/src/btree/mod.rs"),
    include_str!("../../../collections/src/btree/node.rs"),
    include_str!("../../../collections/src/btree/path.rs"),
    include_str!("../../../collections/src/btree/remove.rs"),
    include_str!("../../../collections/src/btree/place.rs"),
    include_str!("../../../collections/src/btree/local.rs"),
    include_str!("../../../collections/src/btree/rearrange.rs"),
];
const SKIPLIST: [&str; 3] = [
    include_str!("../../../collections/src/skiplist/mod.rs"),
    include_str!("../../../collections/src/skiplist/node.rs"),
    include_str!("../../../collections/src/skiplist/place.rs"),
];
const SHARED: [&str; 3] = [
    include_str!("../../../collections/src/local_set.rs"),
    include_str!("../../../collections/src/ordered.rs"),
    include_str!("../../../collections/src/page_filler.rs"),
];

/// A variant, the functions it adds, and what its other lines are recognised by.
type Rule = (&'static str, &'static [&'static str], &'static [&'static str]);

const BTREE_RULES: [Rule; 6] = [
    (
        "dfs",
        &[
            "at",
            "relocate",
            "move_to",
            "place_near",
            "post_order",
            "post_order_from",
            "reopen",
            "make_page_aware_step",
            "relocate_to",
            "rearrange_dfs",
        ],
        &["Strategy::Dfs", "rearrange_dfs", "rearranged_to"],
    ),
    (
        "veb",
        &["at", "relocate", "move_to", "place_near", "relocate_to", "rearrange_veb", "descendants"],
        &["Strategy::Veb", "rearrange_veb"],
    ),
    (
        "local",
        &[
            "at",
            "relocate",
            "move_to",
            "place_near",
            "place_local",
            "cell_of",
            "move_out",
            "leave_with",
            "moved",
            "add",
            "lowest_below",
            "local_layout",
            "slot",
            "set_slot",
            "priority",
        ],
        &["Strategy::Local", "uses_local", "is_local", "self.local", "place_local"],
    ),
    ("local+dfs", &[], &[]),
    ("local+veb", &[], &[]),
    (
        "hint",
        &[
            "at",
            "relocate",
            "move_to",
            "post_order",
            "post_order_from",
            "reopen",
            "rearrange_by_hint",
        ],
        &["Strategy::Hint", "hint_only", "hint"],
    ),
];
const SKIPLIST_RULES: [Rule; 4] = [
    ("page", &["relocate", "move_to", "make_page_aware_to"], &["Strategy::Page", "beside"]),
    (
        "local",
        &[
            "relocate",
            "move_to",
            "place_local",
            "add",
            "lowest_below",
            "lowest_by_address",
            "slot",
            "set_slot",
            "priority",
        ],
        &["Strategy::Local", "uses_local", "is_local", "self.local", "place_local"],
    ),
    ("local+page", &[], &[]),
    ("hint", &["relocate", "move_to", "make_page_aware_to"], &["Strategy::Hint", "hint"]),
];

/// One line of Table 3.
pub(crate) struct Count {
    pub(crate) structure: &'static str,
    pub(crate) variant: &'static str,
    pub(crate) added: usize,
    pub(crate) changed: usize,
    pub(crate) baseline: usize,
}

/// Code lines, each with the function that it is in.
fn code_lines<'a>(files: &[&'a str]) -> Vec<(Option<&'a str>, &'a str)> {
    let mut found = Vec::new();
    for file in files {
        let mut function: Option<(&str, usize)> = None;
        for line in file.lines() {
            let text = line.trim();
            let indent = line.len() - line.trim_start().len();
            if let Some((_, rest)) = text.split_once("fn ")
                && function.is_none()
                && !text.starts_with("//")
                && text.starts_with(|c: char| c.is_ascii_lowercase())
            {
                let end = rest.find(['(', '<']).unwrap_or(rest.len());
                function = Some((&rest[..end], indent));
            }
            if !text.is_empty() && !text.starts_with("//") {
                found.push((function.map(|(name, _)| name), text));
            }
            let ends = |(_, start): (&str, usize)| {
                indent == start && (text == "}" || text.ends_with(';') || text.ends_with(" }"))
            };
            if function.is_some_and(ends) {
                function = None;
            }
        }
    }
    found
}

fn count_variants(structure: &'static str, files: &[&str], rules: &[Rule]) -> Vec<Count> {
    let lines = code_lines(files);
    let all: BTreeSet<&str> = rules.iter().flat_map(|rule| rule.1.iter().copied()).collect();
    let is_listed = |function: &Option<&str>| function.is_some_and(|name| all.contains(name));
    let baseline = lines.iter().filter(|(function, _)| !is_listed(function)).count();
    let parts = |variant: &str| -> Vec<&Rule> {
        rules.iter().filter(|rule| variant.split('+').any(|part| part == rule.0)).collect()
    };
    rules
        .iter()
        .map(|(variant, ..)| {
            let parts = parts(variant);
            let mine = |name: &str| parts.iter().any(|part| part.1.contains(&name));
            let added = lines.iter().filter(|(function, _)| function.is_some_and(mine)).count();
            let names =
                |text: &str| parts.iter().any(|part| part.2.iter().any(|m| text.contains(m)));
            let hooks = lines.iter().filter(|(function, _)| !is_listed(function));
            let changed = hooks.filter(|(_, text)| names(text)).count();
            Count { structure, variant, added, changed, baseline }
        })
        .collect()
}

/// Table 3 of this crate.
pub(crate) fn table() -> Vec<Count> {
    let btree: Vec<&str> = BTREE.into_iter().chain(SHARED).collect();
    let skiplist: Vec<&str> = SKIPLIST.into_iter().chain(SHARED).collect();
    let mut counts = count_variants("btree", &btree, &BTREE_RULES);
    counts.extend(count_variants("skiplist", &skiplist, &SKIPLIST_RULES));
    counts
}
