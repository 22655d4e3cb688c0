//! Rows of figures next to baselines: the table, the file and the picture.

use crate::{Failure, Result};
use plotters::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

/// One figure next to one baseline.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) baseline: String,
    pub(crate) baseline_value: f64,
    /// Turned so that more is better.
    pub(crate) ratio: f64,
    /// Least and largest ratio of the rounds.
    pub(crate) spread: (f64, f64),
    pub(crate) goal: Option<f64>,
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    (low + high) / 2.0
}

fn spread(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (least, values.iter().copied().fold(0.0, f64::max))
}

impl Row {
    /// Two sides that took turns: medians, and the median of the rounds' own ratios.
    pub(crate) fn of_rounds(
        (work, unit): (String, &'static str),
        values: Vec<f64>,
        (baseline, bases): (String, Vec<f64>),
        ratio: impl Fn(f64, f64) -> f64,
        goal: Option<f64>,
    ) -> Row {
        let ratios: Vec<f64> =
            values.iter().zip(&bases).map(|(value, base)| ratio(*value, *base)).collect();
        Row {
            work,
            value: median(values),
            unit,
            baseline,
            baseline_value: median(bases),
            spread: spread(&ratios),
            ratio: median(ratios),
            goal,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.goal {
            None => "",
            Some(goal) if self.ratio >= goal => "yes",
            Some(_) => "NO",
        }
    }
}

/// Three significant digits.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Names of the columns.
pub(crate) fn print_heading() {
    println!("ratio: more is better; spread: least and largest of the rounds\n");
    println!(
        "{:<56} {:>8} {:6}  {:<34} {:>8} {:>6} {:>13} {:>5} met",
        "work", "value", "unit", "baseline", "value", "ratio", "spread", "goal"
    );
}

pub(crate) fn print_group(name: &str, rows: &[Row]) {
    println!("{name}");
    for row in rows {
        let (least, most) = (short(row.spread.0), short(row.spread.1));
        let goal = row.goal.map_or_else(String::new, short);
        let line = format!(
            "  {:<54} {:>8} {:6}  {:<34} {:>8} {:>6} {:>13} {:>5} {}",
            row.work,
            short(row.value),
            row.unit,
            row.baseline,
            short(row.baseline_value),
            short(row.ratio),
            format!("{least}-{most}"),
            goal,
            row.verdict(),
        );
        println!("{}", line.trim_end());
    }
}

/// How many goals are met.
pub(crate) fn print_goals(rows: &[Row]) {
    let met = rows.iter().filter(|row| row.verdict() == "yes").count();
    let goals = rows.iter().filter(|row| row.goal.is_some()).count();
    println!("{met} of {goals} goals met");
}

/// Writes the file and the picture; returns the folder they are in.
pub(crate) fn write(name: &str, rows: &[Row], test: bool) -> Result<PathBuf> {
    // A smoke run does not replace real figures.
    let folder = if test { "target/figures/smoke" } else { "target/figures" };
    // The workspace's, for benchmarks of its members too.
    let mut roots = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = roots.find(|dir| dir.join("Cargo.lock").is_file());
    let folder = root.expect("the workspace has a lock file").join(folder);
    fs::create_dir_all(&folder).map_err(Failure::io)?;
    fs::write(folder.join(format!("{name}.csv")), table(rows)).map_err(Failure::io)?;
    let compared: Vec<&Row> = rows.iter().filter(|row| row.goal.is_some()).collect();
    if !compared.is_empty() {
        draw(&compared, &folder.join(format!("{name}.svg")))
            .map_err(|error| Failure::Broken(format!("{name}.svg: {error}")))?;
    }
    Ok(folder)
}

fn table(rows: &[Row]) -> String {
    let mut text = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for row in rows {
        let Row { work, value, unit, baseline, baseline_value, ratio, .. } = row;
        let goal = row.goal.map_or_else(String::new, |goal| format!("{goal:.4}"));
        // Commas separate the columns.
        let (work, baseline) = (work.replace(',', ";"), baseline.replace(',', ";"));
        text +=
            &format!("{work},{value:.4},{unit},{baseline},{baseline_value:.4},{ratio:.4},{goal}\n");
    }
    text
}

/// A bar for every goal: how near the ratio came, on a logarithmic scale.
fn draw(rows: &[&Row], path: &Path) -> std::result::Result<(), Box<dyn std::error::Error>> {
    const LINE: i32 = 20;
    const TEXT: i32 = 560;
    const BARS: i32 = 420;
    /// Orders of two to each side of the goal.
    const OCTAVES: f64 = 3.0;
    let height = (rows.len() as i32 + 3) * LINE;
    let size = ((TEXT + BARS + 90) as u32, height as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let font = ("sans-serif", 14);
    root.draw(&Text::new("ratio / goal: a bar to the right of 1 meets it", (TEXT, 6), font))?;
    root.draw(&Text::new("ratio", (TEXT + BARS + 20, 6), font))?;
    let x_of = |share: f64| {
        let octaves = share.log2().clamp(-OCTAVES, OCTAVES);
        TEXT + ((octaves + OCTAVES) / (2.0 * OCTAVES) * f64::from(BARS)) as i32
    };
    for share in [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0] {
        let (x, end) = (x_of(share), height - LINE);
        let style = if share == 1.0 { BLACK.stroke_width(2) } else { BLACK.mix(0.2).into() };
        root.draw(&PathElement::new(vec![(x, LINE + 8), (x, end)], style))?;
        root.draw(&Text::new(share.to_string(), (x - 8, end + 2), font))?;
    }
    for (index, row) in rows.iter().enumerate() {
        let top = (index as i32 + 1) * LINE + LINE / 2;
        let share = row.ratio / row.goal.expect("only rows with a goal are drawn");
        let colour = if share >= 1.0 { RGBColor(60, 140, 90) } else { RGBColor(190, 80, 60) };
        let (from, to) =
            (x_of(1.0).min(x_of(share)), x_of(1.0).max(x_of(share)).max(x_of(1.0) + 1));
        root.draw(&Rectangle::new([(from, top + 3), (to, top + LINE - 5)], colour.filled()))?;
        let label = format!("{} / {}", row.work, row.baseline);
        root.draw(&Text::new(label, (8, top + 2), font))?;
        root.draw(&Text::new(short(row.ratio), (TEXT + BARS + 20, top + 2), font))?;
    }
    root.present()?;
    Ok(())
}
