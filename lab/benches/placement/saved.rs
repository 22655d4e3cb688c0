//! Points and layouts that earlier runs measured: a long grid is measured in parts.
//!
//! Every point is appended to a file as soon as it is measured. With `--resume` a run starts with
//! what is there, measures what is missing, and reports all of it.

use crate::report::{Layout, Row};
use crate::run::{Outcome, Point, Variant};
use crate::workload::Mix;
use farheap_collections::Links;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

const POINTS: &str = "placement_points.csv";
const LAYOUTS: &str = "placement_layouts.csv";
const POINTS_HEAD: &str =
    "structure,variant,n,local_pct,queries,alpha,updates,seed,cache,pages_in,pages_out,seconds,sum";
const LAYOUTS_HEAD: &str =
    "structure,variant,n,local_pct,purely_local,in_page,cross_page,far_pages,local_used,built_s";

/// What has been measured so far, in memory and on disk.
pub(crate) struct Saved {
    folder: PathBuf,
    pub(crate) rows: Vec<Row>,
    pub(crate) layouts: Vec<Layout>,
}

impl Saved {
    /// Opens a folder's points; starts anew unless `resume`.
    pub(crate) fn open(folder: &Path, resume: bool) -> Outcome<Saved> {
        std::fs::create_dir_all(folder)?;
        let mut saved = Saved { folder: folder.to_owned(), rows: Vec::new(), layouts: Vec::new() };
        if resume {
            saved.rows = lines(&folder.join(POINTS)).iter().filter_map(|line| row(line)).collect();
            saved.layouts =
                lines(&folder.join(LAYOUTS)).iter().filter_map(|line| layout(line)).collect();
        } else {
            std::fs::write(folder.join(POINTS), format!("{POINTS_HEAD}\n"))?;
            std::fs::write(folder.join(LAYOUTS), format!("{LAYOUTS_HEAD}\n"))?;
        }
        Ok(saved)
    }

    /// Whether a point is there.
    pub(crate) fn has(&self, variant: Variant, local_pct: u64, mix: &Mix) -> bool {
        let same = |row: &Row| {
            row.variant == variant && row.point.local_pct == local_pct && row.point.mix == *mix
        };
        self.rows.iter().any(same)
    }

    pub(crate) fn add_row(&mut self, row: Row) -> Outcome<()> {
        let Row { variant, point } = &row;
        let (mix, head) = (&point.mix, head(*variant, point.mix.n, point.local_pct));
        writeln!(
            self.append(POINTS, POINTS_HEAD)?,
            "{head},{},{},{},{},{},{},{},{:.6},{}",
            mix.count,
            mix.alpha,
            mix.updates,
            mix.seed,
            point.cache,
            point.pages_in,
            point.pages_out,
            point.took.as_secs_f64(),
            point.sum,
        )?;
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn add_layout(&mut self, layout: Layout) -> Outcome<()> {
        let Layout { variant, n, local_pct, links, far_pages, local_used, built_in } = &layout;
        let (head, built) = (head(*variant, *n, *local_pct), built_in.as_secs_f64());
        let Links { purely_local, in_page, cross_page } = links;
        writeln!(
            self.append(LAYOUTS, LAYOUTS_HEAD)?,
            "{head},{purely_local},{in_page},{cross_page},{far_pages},{local_used},{built:.2}",
        )?;
        let same = |old: &Layout| (old.variant, old.n, old.local_pct) == (*variant, *n, *local_pct);
        self.layouts.retain(|old| !same(old));
        self.layouts.push(layout);
        Ok(())
    }

    fn append(&self, name: &str, head: &str) -> Outcome<File> {
        let path = self.folder.join(name);
        let is_new = !path.exists();
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        if is_new {
            writeln!(file, "{head}")?;
        }
        Ok(file)
    }
}

fn head(variant: Variant, n: u64, local_pct: u64) -> String {
    format!("{},{},{n},{local_pct}", variant.structure(), variant.name())
}

/// The lines of a file below its head; none when there is no such file.
fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().skip(1).map(str::to_owned).collect()
}

/// The fields of a line, one after the other.
struct Fields<'a>(std::str::Split<'a, char>);

impl Fields<'_> {
    fn next<T: FromStr>(&mut self) -> Option<T> {
        self.0.next()?.parse().ok()
    }

    fn variant(&mut self) -> Option<Variant> {
        let (structure, name): (String, String) = (self.next()?, self.next()?);
        Variant::all().into_iter().find(|v| v.structure() == structure && v.name() == name)
    }
}

/// A row from its line; `None` for a line that was cut off, or of a variant that is gone.
fn row(line: &str) -> Option<Row> {
    let mut fields = Fields(line.split(','));
    let (variant, n, local_pct) = (fields.variant()?, fields.next()?, fields.next()?);
    let (count, alpha, updates) = (fields.next()?, fields.next()?, fields.next()?);
    let mix = Mix { n, count, alpha, updates, seed: fields.next()? };
    let (cache, pages_in, pages_out) = (fields.next()?, fields.next()?, fields.next()?);
    let (took, sum) = (Duration::from_secs_f64(fields.next()?), fields.next()?);
    Some(Row { variant, point: Point { local_pct, mix, cache, pages_in, pages_out, took, sum } })
}

fn layout(line: &str) -> Option<Layout> {
    let mut fields = Fields(line.split(','));
    let (variant, n, local_pct) = (fields.variant()?, fields.next()?, fields.next()?);
    let (purely_local, in_page, cross_page) = (fields.next()?, fields.next()?, fields.next()?);
    let links = Links { purely_local, in_page, cross_page };
    let (far_pages, local_used) = (fields.next()?, fields.next()?);
    let built_in = Duration::from_secs_f64(fields.next()?);
    Some(Layout { variant, n, local_pct, links, far_pages, local_used, built_in })
}
