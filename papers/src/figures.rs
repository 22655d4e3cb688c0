//! Running a benchmark, round after round, and the rows that it leaves.

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
    /// Whether the benchmark works, if it has not been run so.
    Smoke,
}

impl Size {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Size::Quick => "quick",
            Size::Usual => "usual",
            Size::Paper => "paper",
            Size::Smoke => "smoke",
        }
    }
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

/// Runs a benchmark to its end, for one round.
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
        Size::Smoke => return Ok(()),
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

/// The rows of a benchmark's rounds, in a file: `round` and the columns of one round.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    path: PathBuf,
    /// What each round has left, without the line of columns.
    texts: Vec<String>,
}

const COLUMNS: &str = "round,work,value,unit,baseline,baseline_value,ratio,goal\n";

impl Rounds {
    /// Those that were measured before, or none.
    ///
    /// # Errors
    /// A text, when the file cannot be read.
    pub(crate) fn open(
        root: &Path,
        bench: &str,
        size: Size,
        continues: bool,
    ) -> Result<Rounds, String> {
        let name = format!("{bench}-{}.csv", size.name());
        let path = folder(root, size).join("papers/rounds").join(name);
        let mut rounds = Rounds { path, texts: Vec::new() };
        if !continues || !rounds.path.exists() {
            return Ok(rounds);
        }
        let text = std::fs::read_to_string(&rounds.path).map_err(|error| rounds.why(&error))?;
        let mut last = None;
        for line in text.lines().skip(1) {
            let (round, row) = line.split_once(',').ok_or_else(|| rounds.why(&"no round"))?;
            let round: usize = round.parse().map_err(|error| rounds.why(&error))?;
            // Numbers may be missing: a round that has left no rows has no line.
            if last.replace(round) != Some(round) {
                rounds.texts.push(String::new());
            }
            let text = rounds.texts.last_mut().expect("of this round");
            *text += &format!("{row}\n");
        }
        Ok(rounds)
    }

    fn why(&self, cause: &dyn std::fmt::Display) -> String {
        format!("{}: {cause}", self.path.display())
    }

    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Adds what a run has just left, and keeps it: a later command can go on from here.
    ///
    /// # Errors
    /// A text, when it cannot be read or kept.
    pub(crate) fn add(&mut self, root: &Path, bench: &str, size: Size) -> Result<(), String> {
        let rows = rows_of(root, bench, size);
        let text = std::fs::read_to_string(&rows)
            .map_err(|error| format!("{}: {error}", rows.display()))?;
        let text = text.split_once('\n').map_or("", |(_, rows)| rows);
        self.texts.push(text.to_owned());
        let line = |(round, text): (usize, &String)| -> String {
            text.lines().map(|row| format!("{},{row}\n", round + 1)).collect()
        };
        let all: String = self.texts.iter().enumerate().map(line).collect();
        let folder = self.path.parent().expect("of a folder");
        // At once: a command that is stopped meanwhile leaves the rounds before.
        let new = self.path.with_extension("new");
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&new, COLUMNS.to_owned() + &all))
            .and_then(|()| std::fs::rename(&new, &self.path))
            .map_err(|error| self.why(&error))
    }

    /// The points of an item in each round.
    ///
    /// # Errors
    /// A text, when no round has one of them.
    pub(crate) fn of(&self, item: &Item) -> Result<Vec<Vec<Found>>, String> {
        let found: Vec<Vec<Found>> = self.texts.iter().map(|text| points(item, text)).collect();
        match found.iter().flatten().all(|found| found.ours.is_none()) {
            true => Err(self.why(&"has none of its rows (skipped here?)")),
            false => Ok(found),
        }
    }
}

/// A point of a figure with its values; `None`: unknown, or not measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) point: &'static Point,
    pub(crate) theirs: Option<f64>,
    pub(crate) ours: Option<f64>,
}

/// The points of an item in `work,value,unit,baseline,baseline_value,ratio,goal`.
fn points(item: &Item, text: &str) -> Vec<Found> {
    let rows: Vec<&str> = text.lines().collect();
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
        let text = "btree local+dfs n=9 L=50% alpha=0.8 U=0.05 swapped,30,pages,artifact,40,0.75,<=1.05\n\
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

    #[test]
    fn rounds_are_kept_and_gone_on_with() {
        let root = tempfile::tempdir().expect("a directory");
        let item = CATALOGUE.iter().find(|item| item.name() == "figure 6 metadata");
        let (item, size) = (item.expect("is there"), Size::Quick);
        let rows = rows_of(root.path(), "tiers", size);
        std::fs::create_dir_all(rows.parent().expect("a folder")).expect("made");
        let open = |continues| Rounds::open(root.path(), "tiers", size, continues).expect("opened");
        let mut rounds = open(true);
        assert!(rounds.len() == 0 && rounds.of(item).is_err());
        for ratio in ["0.5", "0.25"] {
            let text = format!("work,value\ntpch migration; metadata,1,MiB,data,2,{ratio},\n");
            std::fs::write(&rows, text).expect("written");
            rounds.add(root.path(), "tiers", size).expect("kept");
        }
        for rounds in [rounds, open(true)] {
            let found = rounds.of(item).expect("measured");
            let ours: Vec<_> = found.iter().map(|round| round[0].ours).collect();
            assert_eq!(ours, [Some(2.0), Some(4.0)]);
        }
        assert_eq!(open(false).len(), 0);
    }

    #[test]
    fn a_round_without_rows_is_none_and_leaves_the_others_whole() {
        let root = tempfile::tempdir().expect("a directory");
        let size = Size::Quick;
        let rows = rows_of(root.path(), "tiers", size);
        std::fs::create_dir_all(rows.parent().expect("a folder")).expect("made");
        let mut rounds = Rounds::open(root.path(), "tiers", size, true).expect("opened");
        for text in ["work\na,1\nb,2\n", "work\n", "work\na,3\nb,4\n"] {
            std::fs::write(&rows, text).expect("written");
            rounds.add(root.path(), "tiers", size).expect("kept");
        }
        let rounds = Rounds::open(root.path(), "tiers", size, true).expect("opened");
        assert_eq!(rounds.texts, ["a,1\nb,2\n", "a,3\nb,4\n"]);
    }
}
