//! A table, a file with the figures, and a picture.

use crate::Args;
use crate::index::GraphStrategy;
use crate::measure::{Built, Outcome, Point};
use comfy_table::{CellAlignment, Table};
use farheap::ByteCount;
use plotters::prelude::*;
use std::fmt::Write as _;
use std::path::Path;

/// A point in a line, as soon as it is known.
pub(crate) fn line(point: &Point) -> String {
    format!(
        "local memory {} %, {}: {:.1} pages a query, recall {:.3}",
        point.setting.percent, point.setting.strategy, point.pages_per_query, point.recall
    )
}

/// The same point under the plain placement.
fn plain<'a>(points: &'a [Point], point: &Point) -> &'a Point {
    let same = |other: &&Point| {
        other.setting.percent == point.setting.percent
            && other.setting.strategy == GraphStrategy::Plain
    };
    points.iter().find(same).expect("plain is measured at every size")
}

/// Prints what was built and all points.
pub(crate) fn print(args: &Args, built: &Built, points: &[Point]) {
    let (bytes, page) = (ByteCount(built.bytes), args.page);
    println!(
        "\n{} vectors of {} dimensions, {bytes} of records in pages of {page}; built in {:.1?}; \
         {} queries for {} neighbours, width {}\n",
        args.vectors, args.dimensions, built.took, args.queries, args.count, args.width
    );
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "local",
        "placement",
        "page cache",
        "purely local",
        "links in page",
        "pages/query",
        "of plain",
        "p50 us",
        "p99 us",
        "recall",
        "placed in",
    ]);
    for point in points {
        let base = plain(points, point).pages_per_query;
        let local = 100.0 * (point.links.in_page + point.links.purely_local) as f64;
        table.add_row([
            format!("{} %", point.setting.percent),
            point.setting.strategy.to_string(),
            point.cache.to_string(),
            point.purely_local.to_string(),
            format!("{:.1} %", local / point.links.total().max(1) as f64),
            format!("{:.1}", point.pages_per_query),
            format!("{:.2}", point.pages_per_query / base.max(f64::MIN_POSITIVE)),
            format!("{:.0}", point.p50.as_secs_f64() * 1e6),
            format!("{:.0}", point.p99.as_secs_f64() * 1e6),
            format!("{:.3}", point.recall),
            format!("{:.1?}", point.arranged_in),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
}

/// Writes `hnsw.csv` and `hnsw.svg`.
pub(crate) fn write(args: &Args, points: &[Point]) -> Outcome<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/figures");
    std::fs::create_dir_all(&folder)?;
    let mut csv = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for point in points {
        let base = plain(points, point);
        let work = format!(
            "hnsw {} n={} L={}%",
            point.setting.strategy, args.vectors, point.setting.percent
        );
        let (value, other) = (point.pages_per_query, base.pages_per_query);
        let ratio = other / value.max(f64::MIN_POSITIVE);
        writeln!(csv, "{work} pages,{value:.2},pages per query,plain,{other:.2},{ratio:.3},")?;
        for (name, mine, theirs) in [("p50", point.p50, base.p50), ("p99", point.p99, base.p99)] {
            let (mine, theirs) = (mine.as_secs_f64() * 1e6, theirs.as_secs_f64() * 1e6);
            writeln!(csv, "{work} {name},{mine:.1},us,plain,{theirs:.1},{:.3},", theirs / mine)?;
        }
        writeln!(csv, "{work} recall,{:.4},share,plain,{:.4},,", point.recall, base.recall)?;
    }
    std::fs::write(folder.join("hnsw.csv"), csv)?;
    let picture = folder.join("hnsw.svg");
    draw(&picture, points)?;
    println!("\nwrote {}", picture.display());
    Ok(())
}

/// Pages a query over local memory, a line for each placement.
fn draw(path: &Path, points: &[Point]) -> Outcome<()> {
    let root = SVGBackend::new(path, (800, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let top = points.iter().map(|point| point.pages_per_query).fold(1.0, f64::max);
    let right = points.iter().map(|point| point.setting.percent).max().unwrap_or(100);
    let mut chart = ChartBuilder::on(&root)
        .caption("HNSW: pages brought in per query", ("sans-serif", 18))
        .margin(12)
        .set_label_area_size(LabelAreaPosition::Left, 60)
        .set_label_area_size(LabelAreaPosition::Bottom, 40)
        .build_cartesian_2d(0..right + 5, 0.0..top * 1.1)?;
    chart.configure_mesh().x_desc("local memory, % of the records").draw()?;
    for (index, strategy) in GraphStrategy::ALL.into_iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let mine = points.iter().filter(|point| point.setting.strategy == strategy);
        let mut mine: Vec<(u32, f64)> =
            mine.map(|point| (point.setting.percent, point.pages_per_query)).collect();
        mine.sort_by_key(|point| point.0);
        let dots = mine.iter().map(|at| Circle::new(*at, 3, color.filled())).collect::<Vec<_>>();
        chart
            .draw_series([PathElement::new(mine, color)])?
            .label(strategy.to_string())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 15, y)], color));
        chart.draw_series(dots)?;
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}
