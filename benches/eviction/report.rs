//! The table, the figures' files and the picture.

use crate::contender::Contender;
use crate::sim::Outcome;
use crate::{COOLING_PCT, COOLING_PCTS, Case, Run};
use plotters::prelude::*;
use std::error::Error;
use std::fs;
use std::path::Path;

/// Against first in, first out the library's policy should never lose more than noise.
const FIFO_GOAL: &str = "0.97";

/// What a read and a minor fault cost, in microseconds: 4 KiB from a disk at queue depth one,
/// and a fault resolved by a handler thread. Only their ratio matters.
const READ_US: f64 = 60.0;
const MINOR_US: f64 = 12.0;

/// Mean cost of a touch in microseconds.
fn cost_us(outcome: &Outcome) -> f64 {
    let touches = (outcome.hits + outcome.reads).max(1) as f64;
    (outcome.reads as f64 * READ_US + outcome.minor as f64 * MINOR_US) / touches
}

pub(crate) fn print(cases: &[Case]) {
    println!("\nHit ratio in percent (minor faults per 1,000 touches), {COOLING_PCT} % cooling;");
    println!("fifo/0 is UMap's, lru* and clock* see every hit, which userfaultfd cannot.\n");
    print!("{:13} {:>6} {:>7} {:>7}", "trace", "cache", "belady", "fifo/0");
    Contender::ALL.iter().for_each(|kind| print!(" {:>12}", kind.name()));
    println!(" {:>6} {:>6}", "lru*", "clock*");
    for case in cases {
        let cache = case.cache_pct();
        let percent = |outcome: Outcome| 100.0 * outcome.hit_ratio();
        let fifo = case.outcome(Contender::Fifo, 0);
        print!("{:13} {cache:>5}% {:>7.2}", case.trace, percent(case.belady));
        print!(" {:>7.2}", percent(fifo));
        for kind in Contender::ALL {
            let outcome = case.outcome(kind, COOLING_PCT);
            let minor = 1_000.0 * outcome.minor as f64 / (outcome.hits + outcome.reads) as f64;
            print!(" {:>6.2} ({minor:>3.0})", percent(outcome));
        }
        println!(" {:>6.2} {:>6.2}", percent(case.lru), percent(case.clock));
    }
    print_means(cases);
}

/// Means over all cases, for every share of cooling frames.
fn print_means(cases: &[Case]) {
    println!("\nMeans over all traces and caches: hit ratio / that of the optimum in percent,");
    println!("and microseconds a touch (a read {READ_US} us, a minor fault {MINOR_US} us):\n");
    print!("{:8}", "cooling");
    Contender::ALL.iter().for_each(|kind| print!(" {:>16}", kind.name()));
    println!();
    for cooling_pct in COOLING_PCTS {
        print!("{cooling_pct:>6} %");
        for kind in Contender::ALL {
            let outcomes = cases.iter().map(|case| (case, case.outcome(kind, cooling_pct)));
            let (mut share, mut cost) = (0.0, 0.0);
            for (case, outcome) in outcomes {
                share += ratio(outcome.hit_ratio(), case.belady.hit_ratio());
                cost += cost_us(&outcome);
            }
            let count = cases.len() as f64;
            print!(" {:>7.2} {:>5.2} us", 100.0 * share / count, cost / count);
        }
        println!();
    }
}

/// `value / base`; one when both are nothing.
fn ratio(value: f64, base: f64) -> f64 {
    if base > 0.0 { value / base } else { 1.0 }
}

/// Writes the files and says where.
pub(crate) fn write(cases: &[Case], folder: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let files = [("eviction.csv", summary(cases)), ("eviction_all.csv", everything(cases))];
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let picture = folder.join("eviction.svg");
    draw(cases, &picture).map_err(|error| format!("{}: {error}", picture.display()))?;
    println!("\nwritten: eviction.csv, eviction_all.csv, eviction.svg in {}", folder.display());
    Ok(())
}

/// The library's policy against the optimum and against first in, first out.
fn summary(cases: &[Case]) -> String {
    let mut text = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for case in cases {
        let work = format!("{} with {} % cached", case.trace, case.cache_pct());
        let value = case.outcome(Contender::Tenure, COOLING_PCT).hit_ratio();
        let fifo = case.outcome(Contender::Fifo, 0).hit_ratio();
        let belady = case.belady.hit_ratio();
        for (name, base, goal) in [("belady", belady, ""), ("fifo (umap)", fifo, FIFO_GOAL)] {
            // What divides by a baseline of nothing has no ratio.
            let times = if base > 0.0 { format!("{:.4}", value / base) } else { String::new() };
            text += &format!("{work},{value:.4},hit ratio,{name},{base:.4},{times},{goal}\n");
        }
    }
    text
}

/// Every figure of every run.
fn everything(cases: &[Case]) -> String {
    let mut text =
        "trace,cache_pct,policy,cooling_pct,fresh,hits,minor_faults,reads,hit_ratio\n".to_owned();
    for case in cases {
        let mut row = |policy: &str, cooling_pct: u32, outcome: Outcome| {
            let Outcome { fresh, hits, minor, reads } = outcome;
            let (trace, cache_pct) = (&case.trace, case.cache_pct());
            text += &format!("{trace},{cache_pct},{policy},{cooling_pct},{fresh},{hits},{minor},");
            text += &format!("{reads},{:.4}\n", outcome.hit_ratio());
        };
        for run in &case.runs {
            row(run.kind.name(), run.cooling_pct, run.outcome);
        }
        row("belady", 0, case.belady);
        row("ideal lru", 0, case.lru);
        row("ideal clock", 0, case.clock);
    }
    text
}

/// One small chart a trace: groups of bars by cache size.
fn draw(cases: &[Case], path: &Path) -> Result<(), Box<dyn Error>> {
    const COLUMNS: usize = 4;
    let traces: Vec<&[Case]> = cases.chunk_by(|a, b| a.trace == b.trace).collect();
    // One cell more, for the legend.
    let rows = (traces.len() + 1).div_ceil(COLUMNS);
    let size = (340 * COLUMNS as u32, 240 * rows as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let cells = root.split_evenly((rows, COLUMNS));
    for (cell, trace) in cells.iter().zip(&traces) {
        draw_trace(trace, cell)?;
    }
    draw_legend(&cells[traces.len()])?;
    root.present()?;
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The bars of a group: name, hit ratio, colour.
fn bars(case: &Case) -> Vec<(String, f64, RGBColor)> {
    const COLOURS: [RGBColor; 4] = [
        RGBColor(140, 170, 210),
        RGBColor(90, 130, 190),
        RGBColor(50, 90, 160),
        RGBColor(110, 80, 160),
    ];
    let fifo = case.outcome(Contender::Fifo, 0).hit_ratio();
    let mut bars = vec![("fifo as in UMap".to_owned(), fifo, RGBColor(190, 190, 190))];
    let others = Contender::ALL.into_iter().filter(|&kind| kind != Contender::Fifo);
    for (index, kind) in others.enumerate() {
        let best = kind == Contender::Tenure;
        let colour = if best { RGBColor(220, 110, 30) } else { COLOURS[index % COLOURS.len()] };
        let name = if best { format!("{kind} (the library's)") } else { kind.to_string() };
        bars.push((name, case.outcome(kind, COOLING_PCT).hit_ratio(), colour));
    }
    bars.push(("LRU that sees hits".to_owned(), case.lru.hit_ratio(), RGBColor(120, 180, 120)));
    bars.push(("Belady's optimum".to_owned(), case.belady.hit_ratio(), RGBColor(40, 40, 40)));
    bars
}

fn draw_trace(cases: &[Case], area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let mut chart = ChartBuilder::on(area)
        .caption(&cases[0].trace, ("sans-serif", 20))
        .margin(8)
        .x_label_area_size(22)
        .y_label_area_size(34)
        .build_cartesian_2d(-0.5..cases.len() as f64 - 0.5, 0.0..1.0)?;
    // Group k is centred on k, where the axis has its labels.
    let label = |x: &f64| {
        cases.get(*x as usize).map_or_else(String::new, |case| format!("{} %", case.cache_pct()))
    };
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .label_style(("sans-serif", 14))
        .x_labels(cases.len())
        .y_labels(6)
        .x_label_formatter(&label)
        .draw()?;
    for (group, case) in cases.iter().enumerate() {
        let bars = bars(case);
        let width = 0.8 / bars.len() as f64;
        for (index, (_, height, colour)) in bars.iter().enumerate() {
            let left = group as f64 - 0.4 + width * index as f64;
            let corners = [(left, 0.0), (left + 0.9 * width, *height)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        }
    }
    Ok(())
}

fn draw_legend(area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let outcome = Outcome::default();
    let runs = Contender::ALL.map(|kind| [0, COOLING_PCT].map(|p| Run::new(kind, p, outcome)));
    let runs = runs.into_iter().flatten().collect();
    let trace = String::new();
    let empty = Case {
        trace,
        cache_permille: 0,
        frames: 0,
        belady: outcome,
        lru: outcome,
        clock: outcome,
        runs,
    };
    let mut y = 30;
    for (name, _, colour) in bars(&empty) {
        area.draw(&Rectangle::new([(30, y), (44, y + 10)], colour.filled()))?;
        area.draw(&Text::new(name, (52, y), ("sans-serif", 17)))?;
        y += 20;
    }
    let notes = ["bars: hit ratio", "groups: cache in % of the pages"];
    for note in notes {
        area.draw(&Text::new(note, (30, y + 4), ("sans-serif", 16)))?;
        y += 16;
    }
    Ok(())
}
