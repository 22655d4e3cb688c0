//! The figure: throughput and memory over time, a row for each mode.

use crate::{Failure, Run, Sample};
use plotters::prelude::*;
use std::fmt::Write;
use std::path::Path;

/// Title, value and colour of a line.
type Line = (&'static str, fn(&Sample) -> f64, RGBColor);

pub(crate) fn write(runs: &[Run], folder: &str) -> Result<(), Failure> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    std::fs::create_dir_all(&folder)?;
    let mut csv = String::from("mode,seconds,orders_per_s,pool_mib,temporary_mib\n");
    for run in runs {
        for s in &run.samples {
            let Sample { seconds, orders_per_s, pool_mib, temporary_mib } = s;
            let name = run.name;
            writeln!(
                csv,
                "{name},{seconds:.3},{orders_per_s:.1},{pool_mib:.2},{temporary_mib:.2}"
            )?;
        }
    }
    std::fs::write(folder.join("cooperative.csv"), csv)?;
    let path = folder.join("cooperative.svg");
    let root = SVGBackend::new(&path, (1000, 700)).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((2, 2));
    for (run, areas) in runs.iter().zip(areas.chunks(2)) {
        let orders: [Line; 1] = [("new orders/s", |s| s.orders_per_s, BLUE)];
        draw(&areas[0], run, &orders)?;
        let memory: [Line; 2] =
            [("table MiB", |s| s.pool_mib, GREEN), ("temporary MiB", |s| s.temporary_mib, RED)];
        draw(&areas[1], run, &memory)?;
    }
    root.present()?;
    Ok(())
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    run: &Run,
    lines: &[Line],
) -> Result<(), Failure> {
    let end = run.samples.last().map_or(1.0, |s| s.seconds);
    let values = run.samples.iter().flat_map(|s| lines.iter().map(move |line| line.1(s)));
    let top = values.fold(1.0, f64::max) * 1.1;
    let names: Vec<&str> = lines.iter().map(|line| line.0).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: {}", run.name, names.join(", ")), ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(24)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    chart.configure_mesh().draw()?;
    for (_, value, color) in lines {
        let points: Vec<_> = run.samples.iter().map(|s| (s.seconds, value(s))).collect();
        chart.draw_series(std::iter::once(PathElement::new(points, color)))?;
    }
    Ok(())
}
