//! The book: every page is in its contents, and every link leads somewhere.
//!
//! A page is read in two places: in the book, and in the crate's documentation, where it is a module. So a page links
//! to another by a definition, `[limits]: ../reference/limits.md`, which `book/links.md` replaces in the documentation.

use crate::{WORDINGS, everything, report, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A page of the book.
struct Page {
    path: PathBuf,
    /// The name by which others link to it: of its file.
    name: String,
    text: String,
}

impl Page {
    /// Lines with their numbers, without those of code.
    fn prose(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_code = false;
        self.text.lines().zip(1..).filter_map(move |(line, number)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            (!is_code && !is_fence).then_some((number, line))
        })
    }

    /// The places within the page that a link may name.
    fn anchors(&self) -> BTreeSet<String> {
        let headings = self.prose().filter_map(|(_, line)| line.strip_prefix('#'));
        headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
    }
}

/// The anchor that a heading gets: of mdBook and of rustdoc alike.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// A line without what stands between backquotes.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

fn pages() -> Vec<Page> {
    let (mut found, mut open) = (Vec::new(), vec![root().join("book/src")]);
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("a readable directory");
            open.extend(entries.map(|entry| entry.expect("a readable entry").path()));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).expect("a readable page");
            found.push(Page { path, name, text });
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

/// What follows each `start` in a line, up to `end`.
fn between<'a>(line: &'a str, start: &'a str, end: char) -> impl Iterator<Item = &'a str> {
    line.split(start).skip(1).filter_map(move |rest| rest.split_once(end).map(|(inner, _)| inner))
}

/// The violations of one page; `pages` are those that it may link to, by their names.
fn violations_of(page: &Page, pages: &BTreeMap<&str, &Path>) -> Vec<String> {
    let definitions: BTreeMap<&str, &str> = page
        .prose()
        .filter_map(|(_, line)| line.strip_prefix('[')?.split_once("]: "))
        .filter(|(name, _)| !name.contains(['[', ']']))
        .collect();
    let folder = page.path.parent().expect("a folder");
    let (mut found, mut used, anchors) = (Vec::new(), BTreeSet::new(), page.anchors());
    for (number, line) in page.prose() {
        let line = without_code(line);
        let mut fail =
            |what: String| found.push(format!("{}:{number}: {what}", page.path.display()));
        for target in between(&line, "](", ')').filter(|target| !target.starts_with("http")) {
            match target.strip_prefix('#') {
                Some(own) if anchors.contains(own) => {}
                Some(own) => fail(format!("no heading is #{own}")),
                None => fail(format!("{target}: link to a page by a definition")),
            }
        }
        if line.starts_with('[') && line.contains("]: ") {
            continue;
        }
        for name in between(&line, "][", ']').chain(between(&line, "[", ']')) {
            if definitions.contains_key(name) {
                used.insert(name.to_owned());
            } else if pages.contains_key(name) || line.contains(&format!("][{name}]")) {
                fail(format!("[{name}] is not defined"));
            }
        }
    }
    for (name, target) in definitions.iter().filter(|(_, target)| !target.starts_with("http")) {
        let to = folder.join(target).canonicalize().ok();
        if to.is_none() || to.as_deref() != pages.get(name).copied() {
            found.push(format!("{}: {target} is not the page [{name}]", page.path.display()));
        }
        if !used.contains(*name) {
            found.push(format!("{}: [{name}] is not used", page.path.display()));
        }
    }
    found
}

#[test]
fn pages_of_the_book_are_in_its_contents_and_links_lead_to_pages() {
    let all = pages();
    let (contents, pages): (Vec<&Page>, Vec<&Page>) =
        all.iter().partition(|page| page.name == "SUMMARY");
    let by_name: BTreeMap<&str, &Path> =
        pages.iter().map(|page| (page.name.as_str(), page.path.as_path())).collect();
    assert_eq!(by_name.len(), pages.len(), "two pages have one name");
    let mut violations: Vec<String> =
        pages.iter().flat_map(|page| violations_of(page, &by_name)).collect();
    let summary = &contents.first().expect("the contents").text;
    let listed: Vec<PathBuf> =
        between(summary, "](", ')').map(|target| root().join("book/src").join(target)).collect();
    let lib = fs::read_to_string(root().join("src/lib.rs")).expect("lib.rs");
    let links = fs::read_to_string(root().join("book/links.md")).expect("the links");
    for page in &pages {
        let name = &page.name;
        if listed.iter().filter(|path| **path == page.path).count() != 1 {
            violations.push(format!("{name} is not once in SUMMARY.md"));
        }
        if name != "introduction" && !links.contains(&format!("[{name}]: crate::book::{name}\n")) {
            violations.push(format!("{name} is not in book/links.md"));
        }
        if name != "introduction" && !lib.split([' ', ';']).any(|word| word == name) {
            violations.push(format!("{name} is no module of the documentation"));
        }
    }
    let missing = listed.iter().filter(|path| !path.is_file());
    violations.extend(missing.map(|path| format!("{} is no page", path.display())));
    report("the book hangs together", &violations);
}

/// What follows `book/src/` where code names a page.
fn named_pages(text: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| !(c.is_ascii_lowercase() || "_/.".contains(c));
    let names = text.split("book/src/").skip(1).filter_map(move |rest| rest.split(ends).next());
    names.map(|name| name.trim_end_matches('.')).filter(|name| name.ends_with(".md"))
}

#[test]
fn pages_that_code_names_are_there() {
    let mut violations = Vec::new();
    for source in everything() {
        let missing =
            named_pages(&source.text).filter(|page| !root().join("book/src").join(page).is_file());
        violations.extend(missing.map(|page| format!("{}: there is no {page}", source.name)));
    }
    report("pages that code names are there", &violations);
}

/// README and the book are as short as this, so that somebody reads them.
const WORDS_MAX: usize = 40_000;

#[test]
fn the_book_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let pages = pages();
    let texts = pages.iter().map(|page| page.text.as_str()).chain([readme.as_str()]);
    let words: usize = texts.map(|text| text.split_whitespace().count()).sum();
    assert!(words <= WORDS_MAX, "{words} words in README.md and book/src, of at most {WORDS_MAX}");
}

#[test]
fn english_is_plain_in_the_book() {
    let mut violations = Vec::new();
    for page in pages() {
        for (number, line) in page.prose() {
            for (wording, better) in WORDINGS.iter().filter(|(wording, _)| line.contains(wording)) {
                violations.push(format!(
                    "{}:{number}: `{wording}`, better: {better}",
                    page.path.display()
                ));
            }
        }
    }
    report("plain English in the book", &violations);
}

/// Rows of statistics are written `name: kind "words";` in the tables of these files.
#[test]
fn the_page_of_statistics_has_every_name() {
    let page =
        fs::read_to_string(root().join("book/src/reference/statistics.md")).expect("the page");
    let files = ["src/paging/counters.rs", "src/pool/stats.rs", "src/limit/manager/stats.rs"];
    let texts = files.map(|file| fs::read_to_string(root().join(file)).expect("the tables"));
    let rows = texts.iter().flat_map(|text| text.lines()).filter(|line| line.ends_with("\";"));
    let names: Vec<&str> =
        rows.filter_map(|row| row.trim().split_once(": ").map(|(name, _)| name)).collect();
    assert!(names.len() > 60, "{} names: the tables were not understood", names.len());
    let missing = names.iter().filter(|name| !page.contains(&format!("`{name}`")));
    let violations: Vec<String> = missing.map(|name| format!("`{name}` is missing")).collect();
    report("the page of statistics has every name", &violations);
}

#[test]
fn headings_become_anchors_as_in_the_book() {
    assert_eq!(anchor("A limit, and whether it holds"), "a-limit-and-whether-it-holds");
    assert_eq!(anchor("`farheap top`"), "farheap-top");
    assert_eq!(without_code("a `[b](c)` d"), "a ` d");
}
