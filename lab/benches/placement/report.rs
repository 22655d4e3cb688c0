//! What the C++ artifact measured, tables, `placement.csv`, and the paper's figures.

use crate::lines;
use crate::run::{Outcome, Point, Variant};
use farheap_collections::Links;
use plotters::prelude::*;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

const SWAPS: &str = include_str!("artifact_swaps.csv");
const LINKS: &str = include_str!("artifact_links.csv");

/// A variant at one size of purely-local memory.
pub(crate) struct Layout {
    pub(crate) variant: Variant,
    pub(crate) n: u64,
    pub(crate) local_pct: u64,
    pub(crate) links: Links,
    pub(crate) far_pages: u64,
    pub(crate) local_used: u64,
    pub(crate) built_in: Duration,
}

/// A variant's point.
pub(crate) struct Row {
    pub(crate) variant: Variant,
    pub(crate) point: Point,
}

/// The artifact's pages and, where known, seconds.
#[derive(Clone, Copy)]
struct Artifact {
    pages: u64,
    seconds: Option<f64>,
}

fn data_lines(csv: &str) -> impl Iterator<Item = Vec<&str>> {
    csv.lines().filter(|line| !line.starts_with('#')).skip(1).map(|line| line.split(',').collect())
}

/// The artifact's figures at a point; of all its variants when `variant` is `None`.
fn artifact(variant: Option<Variant>, point: &Point) -> Vec<Artifact> {
    let close =
        |text: &str, value: f64| text.parse::<f64>().is_ok_and(|v| (v - value).abs() < 1e-9);
    let wanted = |fields: &Vec<&str>| {
        variant.is_none_or(|v| fields[0] == v.structure() && fields[1] == v.name())
            && close(fields[2], point.mix.n as f64)
            && close(fields[3], point.local_pct as f64)
            && close(fields[4], point.mix.alpha)
            && close(fields[5], point.mix.updates)
            && point.mix.count == 10_000
    };
    data_lines(SWAPS)
        .filter(wanted)
        .map(|fields| Artifact {
            pages: fields[6].parse().expect("the embedded file holds numbers"),
            seconds: fields[7].parse().ok(),
        })
        .collect()
}

/// The paper's best variant at a point: the artifact's or this crate's, whichever swapped less.
fn best_of_paper(rows: &[Row], point: &Point) -> Option<(&'static str, u64)> {
    let theirs = artifact(None, point).into_iter().map(|a| ("best artifact variant", a.pages));
    let same = |row: &&Row| row.point.mix == point.mix && row.point.local_pct == point.local_pct;
    let ours = rows.iter().filter(same).filter(|row| row.variant.is_of_paper());
    let ours = ours.map(|row| ("best paper variant here", row.point.swapped()));
    theirs.chain(ours).min_by_key(|(_, pages)| *pages)
}

fn label(row: &Row) -> String {
    let Row { variant, point } = row;
    let mix = point.mix;
    let place = format!("n={} L={}% alpha={} U={}", mix.n, point.local_pct, mix.alpha, mix.updates);
    format!("{} {} {place}", variant.structure(), variant.name())
}

/// Prints the points.
pub(crate) fn print_points(rows: &[Row]) {
    println!("\n| container | L | alpha | U | in | out | swapped | artifact | ratio | time |");
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for row in rows {
        let (point, mix) = (&row.point, row.point.mix);
        let known = if row.variant.is_of_paper() {
            artifact(Some(row.variant), point).first().map(|a| a.pages)
        } else {
            best_of_paper(rows, point).map(|(_, pages)| pages)
        };
        let ratio = known.map(|pages| point.swapped() as f64 / pages as f64);
        println!(
            "| {} {} | {} % | {} | {} | {} | {} | {} | {} | {} | {:.2} s |",
            row.variant.structure(),
            row.variant.name(),
            point.local_pct,
            mix.alpha,
            mix.updates,
            point.pages_in,
            point.pages_out,
            point.swapped(),
            known.map_or(String::new(), |pages| pages.to_string()),
            ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")),
            point.took.as_secs_f64(),
        );
    }
    println!("(paged and leveled: against the paper's best variant at the point)");
}

/// Prints how each variant compares over all its points.
pub(crate) fn print_summary(rows: &[Row]) {
    println!("\n| container | against | points | worst ratio | mean | within the goal |");
    println!("|---|---|---:|---:|---:|---:|");
    let mut variants: Vec<Variant> = rows.iter().map(|row| row.variant).collect();
    variants.dedup();
    for variant in variants {
        let of_paper = variant.is_of_paper();
        let ratios: Vec<f64> = rows
            .iter()
            .filter(|row| row.variant == variant)
            .filter_map(|row| {
                let base = match of_paper {
                    true => artifact(Some(variant), &row.point).first()?.pages,
                    false => best_of_paper(rows, &row.point)?.1,
                };
                Some(row.point.swapped() as f64 / base as f64)
            })
            .collect();
        let goal = if of_paper { 1.05 } else { 0.5 };
        let met = ratios.iter().filter(|ratio| **ratio <= goal).count();
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        println!(
            "| {} {} | {} | {} | {worst:.2} | {:.2} | {met} (at most {goal}) |",
            variant.structure(),
            variant.name(),
            if of_paper { "the artifact" } else { "the paper's best" },
            ratios.len(),
            ratios.iter().sum::<f64>() / ratios.len().max(1) as f64,
        );
    }
}

/// Prints the links (Figure 4) and line counts (Table 3).
pub(crate) fn print_layouts(layouts: &[Layout]) {
    println!(
        "\n| container | L | purely local | in page | cross page | artifact cross | pages | local |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    for layout in layouts {
        let share = |part: u64| 100.0 * part as f64 / layout.links.total().max(1) as f64;
        println!(
            "| {} {} | {} % | {:.1} % | {:.1} % | {:.1} % | {} | {} | {:.1} MB |",
            layout.variant.structure(),
            layout.variant.name(),
            layout.local_pct,
            share(layout.links.purely_local),
            share(layout.links.in_page),
            share(layout.links.cross_page),
            artifact_cross(layout.variant).map_or(String::new(), |share| format!("{share:.1} %")),
            layout.far_pages,
            layout.local_used as f64 / 1e6,
        );
    }
    println!("\n| container | added | deleted | changed | baseline |\n|---|---:|---:|---:|---:|");
    for count in lines::table() {
        let lines::Count { structure, variant, added, changed, baseline } = count;
        println!("| {structure} {variant} | {added} | 0 | {changed} | {baseline} |");
    }
}

/// The artifact's links that cross pages, in percent (2 GB, half of 50 % purely local).
fn artifact_cross(variant: Variant) -> Option<f64> {
    let wanted = |f: &Vec<&str>| f[0] == variant.structure() && f[1] == variant.name();
    let fields = data_lines(LINKS).find(wanted)?;
    let numbers: Vec<f64> = fields[4..7].iter().filter_map(|field| field.parse().ok()).collect();
    Some(100.0 * numbers[2] / numbers.iter().sum::<f64>())
}

/// Writes `placement.csv` and the figures below `folder`.
pub(crate) fn write(folder: &Path, rows: &[Row], layouts: &[Layout]) -> Outcome<()> {
    std::fs::create_dir_all(folder)?;
    let mut csv = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for row in rows {
        let (work, swapped) = (label(row), row.point.swapped());
        let seconds = row.point.took.as_secs_f64();
        let found = artifact(Some(row.variant), &row.point).into_iter().next();
        let (name, base, goal) = match (row.variant.is_of_paper(), found) {
            (true, Some(found)) => ("artifact", Some(found.pages), "<=1.05"),
            (true, None) => ("artifact", None, ""),
            (false, _) => {
                let best = best_of_paper(rows, &row.point);
                (best.map_or("", |best| best.0), best.map(|best| best.1), "<=0.5")
            }
        };
        let base_text = base.map_or(String::new(), |base| base.to_string());
        let ratio = base.map(|base| format!("{:.4}", swapped as f64 / base as f64));
        let ratio = ratio.unwrap_or_default();
        writeln!(csv, "{work} swapped,{swapped},pages,{name},{base_text},{ratio},{goal}")?;
        match found.and_then(|found| found.seconds) {
            Some(base) => {
                let ratio = seconds / base;
                writeln!(
                    csv,
                    "{work} time,{seconds:.4},s,artifact on UMap,{base},{ratio:.4},<=0.333"
                )?;
            }
            None => writeln!(csv, "{work} time,{seconds:.4},s,,,,")?,
        }
    }
    for layout in layouts {
        let links = layout.links;
        let share = 100.0 * links.cross_page as f64 / links.total().max(1) as f64;
        let (structure, name) = (layout.variant.structure(), layout.variant.name());
        let work =
            format!("{structure} {name} n={} L={}% cross-page links", layout.n, layout.local_pct);
        let base = artifact_cross(layout.variant);
        let base_text = base.map_or(String::new(), |base| format!("{base:.2}"));
        let ratio = base.map_or(String::new(), |base| format!("{:.4}", share / base));
        writeln!(csv, "{work},{share:.2},%,artifact at 2 GB,{base_text},{ratio},")?;
    }
    for count in lines::table() {
        let (structure, variant) = (count.structure, count.variant);
        writeln!(csv, "{structure} {variant} lines added,{},lines,,,,", count.added)?;
        writeln!(csv, "{structure} {variant} lines changed,{},lines,,,,", count.changed)?;
    }
    std::fs::write(folder.join("placement.csv"), csv)?;
    plot_links(&folder.join("placement_fig4.svg"), layouts)?;
    plot_swaps(folder, "placement_fig5", "btree", rows)?;
    plot_swaps(folder, "placement_fig6", "skiplist", rows)?;
    println!("\nwrote {}", folder.join("placement.csv").display());
    Ok(())
}

/// Figure 4: shares of the three kinds of links.
fn plot_links(path: &Path, layouts: &[Layout]) -> Outcome<()> {
    let root = SVGBackend::new(path, (900, 60 + 24 * layouts.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let names: Vec<String> = layouts
        .iter()
        .map(|l| format!("{} {} L={} %", l.variant.structure(), l.variant.name(), l.local_pct))
        .collect();
    let count = layouts.len() as i32;
    let mut chart = ChartBuilder::on(&root)
        .caption(
            "Links: purely local (green), in page (blue), cross page (red)",
            ("sans-serif", 15),
        )
        .set_label_area_size(LabelAreaPosition::Left, 200)
        .set_label_area_size(LabelAreaPosition::Bottom, 24)
        .build_cartesian_2d(0.0..100.0, (0..count).into_segmented())?;
    chart
        .configure_mesh()
        .y_labels(layouts.len() + 1)
        .y_label_formatter(&|y| match y {
            SegmentValue::CenterOf(y) => names.get(*y as usize).cloned().unwrap_or_default(),
            _ => String::new(),
        })
        .draw()?;
    for (y, layout) in (0..).zip(layouts) {
        let links = layout.links;
        let total = links.total().max(1) as f64;
        let mut from = 0.0;
        for (part, color) in
            [(links.purely_local, GREEN), (links.in_page, BLUE), (links.cross_page, RED)]
        {
            let to = from + 100.0 * part as f64 / total;
            let bar = [(from, SegmentValue::Exact(y)), (to, SegmentValue::Exact(y + 1))];
            chart.draw_series([Rectangle::new(bar, color.mix(0.6).filled())])?;
            from = to;
        }
    }
    root.present()?;
    Ok(())
}

/// Figures 5 and 6: swapped pages over local memory, one file for each mix; the artifact dashed.
fn plot_swaps(folder: &Path, stem: &str, structure: &str, rows: &[Row]) -> Outcome<()> {
    let mut mixes = Vec::new();
    for row in rows {
        if !mixes.contains(&row.point.mix) {
            mixes.push(row.point.mix);
        }
    }
    for mix in mixes {
        let shown = |row: &&Row| {
            row.point.mix == mix
                && (row.variant.structure() == structure || !row.variant.is_of_paper())
        };
        let rows: Vec<&Row> = rows.iter().filter(shown).collect();
        let Some(top) = rows.iter().map(|row| row.point.swapped()).max() else { continue };
        let right = rows.iter().map(|row| row.point.local_pct).max().unwrap_or(100);
        let name = format!("{stem}_alpha{}_u{}.svg", mix.alpha, mix.updates);
        let path = folder.join(name);
        let root = SVGBackend::new(&path, (900, 540)).into_drawing_area();
        root.fill(&WHITE)?;
        let title =
            format!("{structure}: pages swapped, alpha {}, updates {}", mix.alpha, mix.updates);
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 17))
            .margin(10)
            .set_label_area_size(LabelAreaPosition::Left, 70)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d(0_u64..right + 5, 0_u64..top + top / 5 + 1)?;
        chart.configure_mesh().x_desc("local memory, % of the data").draw()?;
        let mut variants: Vec<Variant> = Vec::new();
        for row in &rows {
            if !variants.contains(&row.variant) {
                variants.push(row.variant);
            }
        }
        for (index, variant) in variants.into_iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let mine: Vec<&&Row> = rows.iter().filter(|row| row.variant == variant).collect();
            let mut line: Vec<(u64, u64)> =
                mine.iter().map(|row| (row.point.local_pct, row.point.swapped())).collect();
            line.sort_unstable();
            let theirs = mine.iter().filter_map(|row| {
                let known = artifact(Some(variant), &row.point).into_iter().next()?;
                Some(Cross::new((row.point.local_pct, known.pages), 5, color))
            });
            let theirs: Vec<_> = theirs.collect();
            chart
                .draw_series([PathElement::new(line, color)])?
                .label(variant.name())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 15, y)], color));
            chart.draw_series(theirs)?;
        }
        chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
        root.present()?;
    }
    Ok(())
}
