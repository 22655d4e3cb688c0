//! The table, `target/figures/ffi.csv` and `ffi.svg`.

use crate::rows::Goal;
use plotters::prelude::*;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// What a row cost on both sides.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) goal: Goal,
    pub(crate) foreign_ns: f64,
    pub(crate) own_ns: f64,
}

impl Row {
    /// The most that the other side may cost.
    fn allowed_ns(&self) -> f64 {
        match self.goal {
            Goal::Calls(calls) => self.own_ns + 2.0 * f64::from(calls),
            Goal::Times(times) => self.own_ns * times,
        }
    }
}

pub(crate) fn print(rows: &[Row]) {
    println!(
        "{:46} {:>9} {:>9} {:>9}",
        "ns, all calls of a row together", "C/C++", "Rust", "allowed"
    );
    for row in rows {
        let met = if row.foreign_ns <= row.allowed_ns() { "" } else { "  above" };
        println!(
            "{:46} {:9.2} {:9.2} {:9.2}{met}",
            row.name,
            row.foreign_ns,
            row.own_ns,
            row.allowed_ns()
        );
    }
}

fn figures() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    target.unwrap_or(root).join("figures")
}

pub(crate) fn write(rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let dir = figures();
    fs::create_dir_all(&dir)?;
    let mut csv = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for row in rows {
        let (ratio, goal) = (row.own_ns / row.foreign_ns, row.own_ns / row.allowed_ns());
        let (work, foreign, own) = (row.name.replace(',', " and"), row.foreign_ns, row.own_ns);
        csv += &format!("{work},{foreign:.2},ns,Rust,{own:.2},{ratio:.3},{goal:.3}\n");
    }
    fs::write(dir.join("ffi.csv"), csv)?;
    draw(rows, &dir.join("ffi.svg"))?;
    println!("wrote {}", dir.join("ffi.csv").display());
    Ok(())
}

/// Bars: Rust below, the other side above it.
fn draw(rows: &[Row], to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(to, (900, 80 + 50 * rows.len() as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let most = rows.iter().map(|row| row.foreign_ns.max(row.own_ns)).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .caption("A call through the C ABI (red) and from Rust (grey)", ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(320)
        .build_cartesian_2d(0.0..most * 1.1, 0.0..rows.len() as f64)?;
    let name = |at: &f64| rows.get(at.floor() as usize).map_or("", |row| row.name).to_owned();
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(rows.len())
        .y_label_formatter(&name)
        .x_desc("ns")
        .draw()?;
    for (index, row) in rows.iter().enumerate() {
        let at = index as f64;
        let bars = [(row.own_ns, 0.15, BLACK.mix(0.4)), (row.foreign_ns, 0.5, RED.mix(0.7))];
        for (ns, above, colour) in bars {
            let corners = [(0.0, at + above), (ns, at + above + 0.3)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        }
    }
    area.present()?;
    Ok(())
}
