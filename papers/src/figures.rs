//! Running a benchmark, and the rows that it leaves.

use crate::catalogue::{Column, Item, Point, Run, Theirs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// The member of the workspace that has the benchmarks.
const PACKAGE: &str = "farheap-lab";

/// How large a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// Minutes.
    Quick,
    /// The benchmark's own.
    Usual,
    /// The paper's.
    Paper,
    /// No run.
    AsMeasured,
    /// Whether the benchmark works, if it has not been run so.
    Smoke,
}

/// Where the rows of runs of a size are.
pub(crate) fn folder(root: &Path, size: Size) -> PathBuf {
    root.join(if size == Size::Smoke { "target/figures/smoke" } else { "target/figures" })
}

fn rows_of(root: &Path, bench: &str, size: Size) -> PathBuf {
    folder(root, size).join(bench).with_extension("csv")
}

/// Whether a run of a size has left rows.
pub(crate) fn has_rows(root: &Path, bench: &str, size: Size) -> bool {
    rows_of(root, bench, size).exists()
}

/// Runs a benchmark to its end.
///
/// # Errors
/// A text, when it cannot be started, fails, or leaves no rows; a smoke run may be skipped.
pub(crate) fn run(root: &Path, run: &Run, size: Size) -> Result<(), String> {
    let rows = rows_of(root, run.bench, size);
    let args = match size {
        Size::Quick => run.quick,
        Size::Usual => run.usual,
        Size::Paper => run.paper,
        Size::Smoke if !rows.exists() => &["--test"],
        Size::AsMeasured | Size::Smoke => return Ok(()),
    };
    let written = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    let before: Option<SystemTime> = written(&rows);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    println!("cargo bench -p {PACKAGE} --bench {} -- {}", run.bench, args.join(" "));
    let mut command = Command::new(cargo);
    command.current_dir(root).args(["bench", "-p", PACKAGE, "--bench", run.bench, "--"]);
    let status = command.args(args).status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!("the benchmark {} ended with {status}", run.bench));
    }
    // One that skips itself succeeds, and leaves what an earlier run has measured.
    match written(&rows) == before && size != Size::Smoke {
        true => Err(format!("the benchmark {} has measured nothing here", run.bench)),
        false => Ok(()),
    }
}

/// A point of a figure with its values; `None`: unknown, or not measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) point: &'static Point,
    pub(crate) theirs: Option<f64>,
    pub(crate) ours: Option<f64>,
}

/// Reads an item's points from the rows of its benchmark.
///
/// # Errors
/// A text, when there are no rows.
pub(crate) fn read(root: &Path, item: &Item, size: Size) -> Result<Vec<Found>, String> {
    let path = rows_of(root, item.run.bench, size);
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let found = points(item, &text);
    if found.iter().all(|found| found.ours.is_none()) {
        return Err(format!("{}: has none of its rows (skipped here?)", path.display()));
    }
    Ok(found)
}

/// The points of an item in `work,value,unit,baseline,baseline_value,ratio,goal`.
fn points(item: &Item, text: &str) -> Vec<Found> {
    let rows: Vec<&str> = text.lines().skip(1).collect();
    let found = |point: &'static Point| {
        let row = rows.iter().find(|row| point.row.iter().all(|part| row.contains(part)));
        let number = |at: usize| row?.split(',').nth(at)?.parse::<f64>().ok();
        let ours = match point.ours {
            Column::Value => number(1),
            Column::Ratio => number(5),
            Column::Baseline => number(4),
            Column::Inverse => number(5).map(|ratio| 1.0 / ratio),
            Column::Change => number(5).map(|ratio| 100.0 * (1.0 / ratio - 1.0)),
        };
        let theirs = match point.theirs {
            Theirs::Unknown => None,
            Theirs::Is(value) => Some(value),
            Theirs::Baseline => number(4),
        };
        let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
        Found { point, theirs: finite(theirs), ours: finite(ours) }
    };
    item.points.iter().map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::CATALOGUE;

    #[test]
    fn points_are_found_by_all_parts_of_their_names() {
        let item = CATALOGUE.iter().find(|item| item.name() == "figure 5 collective");
        let item = item.expect("is there");
        let text = "work,value,unit,baseline,baseline_value,ratio,goal\n\
            btree local+dfs n=9 L=50% alpha=0.8 U=0.05 swapped,30,pages,artifact,40,0.75,<=1.05\n\
            btree dfs n=9 L=50% alpha=0.8 U=0.05 time,1,s,,,,\n\
            btree dfs n=9 L=50% alpha=0.8 U=0.05 swapped,50,pages,artifact,,,\n";
        let found = points(item, text);
        let of = |label: &str| {
            let found = found.iter().find(|found| found.point.label == label).expect(label);
            (found.theirs, found.ours)
        };
        assert_eq!(of("B-tree local+dfs"), (Some(40.0), Some(30.0)));
        assert_eq!(of("B-tree dfs"), (None, Some(50.0)));
        assert_eq!(of("B-tree hint"), (None, None));
    }
}
