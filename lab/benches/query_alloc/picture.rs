//! Pictures: memory over time, and the distribution of latencies; and the numbers of the former.

use crate::Samples;
use crate::engine::{Sample, quantile};
use plotters::prelude::*;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The rate that memory is drawn for: the paper's figures are of its middle one, too.
const DRAWN: &str = "one";

const MIB: f64 = (1 << 20) as f64;

pub(crate) fn write(folder: &Path, rates: &[(&str, Vec<Samples>)]) -> Result<(), Box<dyn Error>> {
    let mut text =
        "rate,allocator,seconds,requested_mib,resident_mib,lazily_freed_mib\n".to_owned();
    for (rate, all) in rates {
        for samples in all {
            let seen = samples.seen.last().expect("there is a round");
            for Sample { at, requested, resident, lazy } in &seen.memory {
                let [requested, resident, lazy] = [requested, resident, lazy].map(|b| b / MIB);
                let name = samples.program.name().replace(',', ";");
                writeln!(text, "{rate},{name},{at:.4},{requested:.2},{resident:.2},{lazy:.2}")?;
            }
        }
    }
    fs::write(folder.join("query_alloc_memory.csv"), text)?;
    if let Some((_, all)) = rates.iter().find(|(rate, _)| *rate == DRAWN) {
        memory(all, &folder.join("query_alloc_memory.svg"))?;
    }
    latencies(rates, &folder.join("query_alloc_latency.svg"))
}

/// Resident memory over time, a line for each allocator, and what was requested of the first.
fn memory(all: &[Samples], path: &Path) -> Result<(), Box<dyn Error>> {
    let lines: Vec<_> = all
        .iter()
        .filter_map(|samples| Some((samples.program.name(), &samples.seen.last()?.memory)))
        .collect();
    let points = || lines.iter().flat_map(|(_, memory)| memory.iter());
    let end = points().map(|sample| sample.at).fold(0.1, f64::max);
    let top =
        points().map(|sample| sample.requested.max(sample.resident)).fold(MIB, f64::max) / MIB;
    let root = SVGBackend::new(path, (900, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..end, 0.0..top * 1.05)?;
    chart.configure_mesh().x_desc("seconds").y_desc("MiB").draw()?;
    let requested = lines.first().into_iter().flat_map(|(_, memory)| memory.iter());
    let requested = requested.map(|sample| (sample.at, sample.requested / MIB));
    chart
        .draw_series([PathElement::new(requested.collect::<Vec<_>>(), BLACK.mix(0.4))])?
        .label("requested")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.mix(0.4)));
    for (index, (name, memory)) in lines.iter().enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let resident = memory.iter().map(|sample| (sample.at, sample.resident / MIB));
        chart
            .draw_series([PathElement::new(resident.collect::<Vec<_>>(), colour.stroke_width(2))])?
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).draw()?;
    root.present()?;
    Ok(())
}

/// For each rate and allocator a box from the first to the third quartile, its median, and a line from the 5th
/// to the 95th percentile.
fn latencies(rates: &[(&str, Vec<Samples>)], path: &Path) -> Result<(), Box<dyn Error>> {
    let boxes: Vec<_> = rates
        .iter()
        .flat_map(|(rate, all)| all.iter().map(move |samples| (*rate, samples)))
        .filter_map(|(rate, samples)| {
            Some((rate, samples.program, &samples.seen.last()?.latencies))
        })
        .collect();
    let top = boxes.iter().map(|(.., all)| quantile(all, 0.95)).fold(1.0, f64::max);
    let (width, height) = (boxes.len() as i32 * 44 + 80, 420);
    let root = SVGBackend::new(path, (width as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    // Logarithmic, from a tenth of a millisecond.
    let y_of = |ms: f64| {
        let share = (ms.max(0.1) / 0.1).ln() / (top / 0.1).ln().max(1e-9);
        height - 90 - (share * f64::from(height - 120)) as i32
    };
    let font = ("sans-serif", 12);
    for ms in [0.1, 1.0, 10.0, 100.0, 1e3, 1e4].into_iter().filter(|ms| *ms <= top) {
        let line = vec![(60, y_of(ms)), (width - 10, y_of(ms))];
        root.draw(&PathElement::new(line, BLACK.mix(0.2)))?;
        root.draw(&Text::new(format!("{ms} ms"), (6, y_of(ms) - 6), font))?;
    }
    for (index, (rate, program, all)) in boxes.iter().enumerate() {
        let x = 70 + index as i32 * 44;
        let y = |share: f64| y_of(quantile(all, share));
        let colour = Palette99::pick(index % (boxes.len() / rates.len().max(1)).max(1)).to_rgba();
        root.draw(&PathElement::new(vec![(x + 14, y(0.05)), (x + 14, y(0.95))], colour))?;
        root.draw(&Rectangle::new(
            [(x, y(0.75)), (x + 28, y(0.25) + 1)],
            colour.mix(0.5).filled(),
        ))?;
        root.draw(&PathElement::new(vec![(x, y(0.5)), (x + 28, y(0.5))], BLACK))?;
        root.draw(&Text::new(
            program.name(),
            (x - 6, height - 80 + (index as i32 % 2) * 14),
            font,
        ))?;
        root.draw(&Text::new(*rate, (x - 2, height - 44), font))?;
    }
    root.present()?;
    Ok(())
}
