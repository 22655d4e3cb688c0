//! The table, the CSV and the figure.

use crate::Failure;
use plotters::prelude::*;
use std::fmt::Write;
use std::path::Path;

/// A measured value beside its baseline.
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) baseline: &'static str,
    pub(crate) baseline_value: f64,
    pub(crate) goal: &'static str,
}

impl Row {
    /// Value and baseline, turned so that more is better.
    fn ratio(&self) -> f64 {
        let is_speed = matches!(self.unit, "pages/s" | "pages/us" | "hits");
        let (value, base) = (self.value, self.baseline_value);
        // Of counts, none at all is as good as one.
        let count = self.unit == "pages";
        if is_speed { value / base } else { base / if count { value.max(1.0) } else { value } }
    }
}

pub(crate) fn print(row: &Row) {
    println!(
        "{:<52} {:>12.2} {:<9} {:>12.2} {:<22} ratio {:>7.3}  goal {}",
        row.work,
        row.value,
        row.unit,
        row.baseline_value,
        row.baseline,
        row.ratio(),
        row.goal
    );
}

pub(crate) fn write(rows: &[Row], folder: &str) -> Result<(), Failure> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    std::fs::create_dir_all(&folder)?;
    let mut csv = String::from("work,value,unit,baseline,baseline_value,ratio,goal\n");
    for row in rows {
        let (value, base, ratio) = (row.value, row.baseline_value, row.ratio());
        let Row { work, unit, baseline, goal, .. } = row;
        writeln!(csv, "{work},{value:.4},{unit},{baseline},{base:.4},{ratio:.4},{goal}")?;
    }
    std::fs::write(folder.join("pool.csv"), csv)?;
    draw(rows, &folder.join("pool.svg"))
}

fn draw(rows: &[Row], path: &Path) -> Result<(), Failure> {
    let height = 60 + 22 * rows.len() as u32;
    let root = SVGBackend::new(path, (1000, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let style = ("sans-serif", 13).into_font();
    root.draw(&Text::new("times as good as the baseline (line at 1)", (10, 10), style.clone()))?;
    let scale = |ratio: f64| 500 + (ratio.clamp(0.01, 100.0).log10() * 200.0) as i32;
    for (index, row) in rows.iter().enumerate() {
        let y = 40 + 22 * index as i32;
        root.draw(&Text::new(row.work.clone(), (10, y), style.clone()))?;
        let ends = [(scale(1.0), y), (scale(row.ratio()), y + 14)];
        root.draw(&Rectangle::new(ends, BLUE.mix(0.6).filled()))?;
        let label = format!("{:.3}", row.ratio());
        root.draw(&Text::new(label, (930, y), style.clone()))?;
    }
    let bottom = height as i32 - 10;
    root.draw(&PathElement::new(vec![(500, 30), (500, bottom)], BLACK))?;
    root.present()?;
    Ok(())
}
