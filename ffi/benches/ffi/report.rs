//! The table, `target/figures/ffi.csv` and `ffi.svg`.

use crate::rows::Goal;
use crate::sides::Way;
use plotters::prelude::*;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// What a row cost on all sides.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) goal: Goal,
    /// In the order of [`Way::ALL`].
    pub(crate) foreign_ns: [f64; Way::ALL.len()],
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
    let [first, second, third] = Way::ALL.map(Way::name);
    println!(
        "{:46} {first:>9} {second:>9} {third:>9} {:>9} {:>9}",
        "ns, all calls of a row together; C, C++ as", "Rust", "allowed"
    );
    for row in rows {
        let allowed = row.allowed_ns();
        let mark = |ns: f64| if ns <= allowed { ' ' } else { '*' };
        let [first, second, third] = row.foreign_ns.map(|ns| format!("{ns:8.2}{}", mark(ns)));
        let (name, own) = (row.name, row.own_ns);
        println!("{name:46} {first} {second} {third} {own:9.2} {allowed:9.2}");
    }
    println!("* above what is allowed");
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
        let (work, own, goal) = (row.name.replace(',', " and"), row.own_ns, row.allowed_ns());
        for (foreign, way) in row.foreign_ns.into_iter().zip(Way::ALL) {
            let (ratio, goal) = (own / foreign, own / goal);
            let way = way.name();
            csv += &format!("{work} ({way}),{foreign:.2},ns,Rust,{own:.2},{ratio:.3},{goal:.3}\n");
        }
    }
    fs::write(dir.join("ffi.csv"), csv)?;
    draw(rows, &dir.join("ffi.svg"))?;
    println!("wrote {}", dir.join("ffi.csv").display());
    Ok(())
}

/// Bars: Rust below, the other sides above it.
fn draw(rows: &[Row], to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(to, (900, 80 + 50 * rows.len() as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let most = rows
        .iter()
        .map(|row| row.foreign_ns[Way::ALL.len() - 1].max(row.own_ns))
        .fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .caption("From Rust (grey), from C: static, shared, plug-in (red)", ("sans-serif", 18))
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
        let [fixed, shared, late] = row.foreign_ns;
        let bars = [(row.own_ns, BLACK.mix(0.4)), (fixed, RED.mix(0.4)), (shared, RED.mix(0.6))];
        for (index, (ns, colour)) in bars.into_iter().chain([(late, RED.mix(0.8))]).enumerate() {
            let bottom = at + 0.1 + 0.2 * index as f64;
            let corners = [(0.0, bottom), (ns, bottom + 0.18)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        }
    }
    area.present()?;
    Ok(())
}
