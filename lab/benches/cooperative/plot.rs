//! Pictures.

use crate::Failure;
use crate::run::{Run, Sample};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Title, value and colour of a line.
type Line = (&'static str, fn(&Sample) -> f64, RGBColor);

const ORDERS: [Line; 1] = [("new orders/s", |s| s.orders as f64 / s.length, BLUE)];
const MEMORY: [Line; 4] = [
    ("tables", |s| s.pool_mib, GREEN),
    ("temporary", |s| s.temporary_mib, RED),
    ("spilled", |s| s.spilled_mib, MAGENTA),
    ("other", |s| s.beside_mib, BLACK),
];

/// Throughput on the left and memory on the right, a row for each run.
pub(crate) fn over_time(runs: &[Run], path: &Path) -> Result<(), Failure> {
    let root = SVGBackend::new(path, (1100, 230 * runs.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let top = |lines: &[Line]| {
        let samples = runs.iter().flat_map(|run| &run.samples);
        let values = samples.flat_map(|s| lines.iter().map(|line| line.1(s)));
        values.fold(1.0, f64::max) * 1.05
    };
    let (orders_top, memory_top) = (top(&ORDERS), top(&MEMORY));
    for (run, areas) in runs.iter().zip(root.split_evenly((runs.len(), 2)).chunks(2)) {
        draw(&areas[0], run, "new orders/s", &ORDERS, orders_top)?;
        let used = MEMORY.into_iter().filter(|line| run.samples.iter().any(|s| line.1(s) > 0.0));
        draw(&areas[1], run, "MiB", &used.collect::<Vec<_>>(), memory_top)?;
    }
    root.present()?;
    Ok(())
}

fn draw(area: &Area<'_>, run: &Run, unit: &str, lines: &[Line], top: f64) -> Result<(), Failure> {
    let end = run.samples.last().map_or(1.0, |s| s.seconds);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: {unit}", run.name), ("sans-serif", 14))
        .margin(8)
        .x_label_area_size(22)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    chart.configure_mesh().light_line_style(WHITE).draw()?;
    for (title, value, color) in lines {
        let points: Vec<_> = run.samples.iter().map(|s| (s.seconds, value(s))).collect();
        let series = chart.draw_series(std::iter::once(PathElement::new(points, color)))?;
        let color = *color;
        series.label(*title).legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], color));
    }
    if lines.len() > 1 {
        chart.configure_series_labels().background_style(WHITE.mix(0.7)).draw()?;
    }
    Ok(())
}

/// Bars: groups of a few bars each, every kind of bar with a scale of its own.
pub(crate) fn bars(
    path: &Path,
    kinds: &[&str],
    groups: &[(String, Vec<f64>)],
) -> Result<(), Failure> {
    let root = SVGBackend::new(path, (1000, 190 * kinds.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((kinds.len(), 1));
    for (kind, (title, area)) in kinds.iter().zip(&areas).enumerate() {
        let values: Vec<f64> = groups.iter().map(|(_, values)| values[kind]).collect();
        let finite = values.iter().copied().filter(|value| value.is_finite());
        let top = finite.fold(1e-9, f64::max) * 1.15;
        let mut chart = ChartBuilder::on(area)
            .caption(title, ("sans-serif", 14))
            .margin(6)
            .x_label_area_size(22)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..groups.len() as f64, 0.0..top)?;
        let name = |x: &f64| {
            let at = (x - 0.5).round() as usize;
            let is_middle = (x - 0.5 - at as f64).abs() < 0.01;
            groups.get(at).filter(|_| is_middle).map_or(String::new(), |group| group.0.clone())
        };
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .disable_x_mesh()
            .x_labels(2 * groups.len() + 1)
            .x_label_formatter(&name)
            .draw()?;
        chart.draw_series(values.iter().enumerate().filter(|(_, v)| v.is_finite()).map(
            |(at, value)| {
                let x = at as f64;
                Rectangle::new([(x + 0.2, 0.0), (x + 0.8, *value)], BLUE.mix(0.6).filled())
            },
        ))?;
    }
    root.present()?;
    Ok(())
}
