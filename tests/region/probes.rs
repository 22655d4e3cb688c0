//! Probes for tracers.
//!
//! Guards: the interface.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The page that has the table of probes.
const PAGE: &str = "book/src/how_to/containers.md";

#[test]
fn a_program_has_the_probes_of_the_book_with_their_arguments() {
    let program = std::env::current_exe().expect("/proc/self/exe");
    let listed = match Command::new("readelf").arg("--notes").arg(program).output() {
        Ok(listed) => String::from_utf8(listed.stdout).expect("ASCII"),
        Err(error) => {
            println!("skipped: readelf does not start: {error}");
            return;
        }
    };
    let after = |line: &str, what| line.trim().strip_prefix(what).map(str::to_owned);
    let mut found = BTreeSet::new();
    for note in listed.split("Provider: farheap\n").skip(1) {
        let field = |what| note.lines().find_map(|line| after(line, what)).expect(what);
        found.insert((field("Name: "), field("Arguments: ").split(' ').count()));
    }
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE)).expect(PAGE);
    let table = page.split("| probe |").nth(1).expect("a table of probes");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let told: BTreeSet<_> = rows
        .map(|row| {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[2].split(", ").count())
        })
        .collect();
    assert!(told.len() >= 4, "{table}");
    assert_eq!(found, told);
}
