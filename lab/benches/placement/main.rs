//! Object placement: pages swapped by ordered maps under every strategy.
//!
//! The key-value Scan benchmark of "Collective Allocator Abstraction to Control Object Spatial
//! Locality in C++" (Hideshima, Sato, Ugawa, 2024), against what its C++ artifact swaps.
//!
//! ```text
//! cargo bench -p farheap-lab --bench placement                          # 200 MB, a part of the grid: minutes
//! cargo bench -p farheap-lab --bench placement -- --paper               # 2 GB, the whole grid: hours
//! cargo bench -p farheap-lab --bench placement -- --variant btree:dfs --local 5,10,50 --alpha 0.8
//! cargo bench -p farheap-lab --bench placement -- --costs               # what allocating costs, nothing else
//! cargo bench -p farheap-lab --bench placement -- --steps               # rearrangement in parts, nothing else
//! cargo bench -p farheap-lab --bench placement -- --levels              # page sizes by level, nothing else
//! cargo bench -p farheap-lab --bench placement -- --test                # does it work? (so does `cargo test`)
//! ```
//! Prints points, links (Figure 4) and line counts (Table 3, see `lines.rs` for the rule), and
//! writes `target/figures/placement.csv` and Figures 4, 5 and 6 as SVG; crosses are the artifact.
//! Pages are counted by the page handler: 4 KiB read and written during the queries, all far pages
//! out at the start. It checks its own answers: all variants read the same pairs.

mod cost;
#[path = "../../../tests/common/faulty.rs"]
mod faulty;
mod levels;
mod lines;
mod report;
mod run;
mod saved;
mod steps;
mod workload;

use clap::Parser;
use farheap::region::{FaultMode, RegionConfig};
use farheap_collections::sub::CollectiveConfig;
use report::Row;
use run::{Built, Outcome, Variant};
use saved::Saved;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use workload::Mix;

#[derive(Debug, Parser)]
#[command(about = "Pages swapped by containers under every placement strategy")]
struct Args {
    /// Pairs of 160 bytes.
    #[arg(long)]
    n: Option<u64>,
    /// Queries.
    #[arg(long, default_value_t = 10_000)]
    queries: usize,
    /// Local memory in percent of the data.
    #[arg(long, value_delimiter = ',')]
    local: Vec<u64>,
    /// Zipfian skewness of the keys asked for.
    #[arg(long, value_delimiter = ',')]
    alpha: Vec<f64>,
    /// Share of updates.
    #[arg(long, value_delimiter = ',', default_values_t = [0.05, 0.5])]
    updates: Vec<f64>,
    /// Variants as `btree:dfs`, `skiplist:local+page`, `paged:hot`, `leveled:far`; default all.
    #[arg(long, value_delimiter = ',')]
    variant: Vec<String>,
    /// Faults served by handler threads, not by the thread that faults.
    #[arg(long)]
    handlers: bool,
    /// Scans ask for all of their pages at once, where the container can (`fetch_from`).
    #[arg(long)]
    fetch: bool,
    /// Seed of values and queries.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The paper's scale: 2 GB, local memory from 5 % to 200 %, both skews.
    #[arg(long)]
    paper: bool,
    /// All points of the paper, local memory from 5 % to 200 % and both skews, at any scale.
    #[arg(long)]
    grid: bool,
    /// Keeps the points that earlier runs have measured, and measures those that are missing.
    #[arg(long)]
    resume: bool,
    /// Where points, tables and figures go; default `target/figures`.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Only what an allocation costs in each sub-allocator.
    #[arg(long)]
    costs: bool,
    /// Only a rearrangement in parts: time and memory.
    #[arg(long)]
    steps: bool,
    /// Only page sizes by level: pages, bytes and time, and which sizes the cost model chooses.
    #[arg(long)]
    levels: bool,
    /// A tiny scale, to see that it works.
    #[arg(long)]
    test: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    /// Fills in what was not given, by scale.
    fn complete(mut self) -> Args {
        const PAPER_LOCAL: [u64; 15] =
            [5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 100, 120, 150, 200];
        // `cargo test` runs benches without `--bench` and wants to be quick.
        self.test |= !self.bench && !self.paper && self.n.is_none();
        let n = match (self.test, self.paper) {
            (true, _) => 20_000,
            (false, true) => 13_421_773,
            (false, false) => 1_342_177,
        };
        let (local, alpha): (&[u64], &[f64]) = match (self.test, self.paper || self.grid) {
            (true, _) => (&[50, 300], &[0.8]),
            (false, true) => (&PAPER_LOCAL, &[0.8, 1.3]),
            (false, false) => (&[10, 50], &[0.8]),
        };
        if self.test {
            self.queries = self.queries.min(500);
        }
        self.n.get_or_insert(n);
        if self.local.is_empty() {
            self.local = local.to_vec();
        }
        if self.alpha.is_empty() {
            self.alpha = alpha.to_vec();
        }
        self
    }

    /// How pages come and go.
    fn region(&self, n: u64) -> RegionConfig {
        CollectiveConfig::default_region()
            .limit(run::ample(n))
            // No pointer of a container reaches a system call.
            .mode(if self.handlers { FaultMode::Auto } else { FaultMode::InThread })
    }

    fn variants(&self) -> Outcome<Vec<Variant>> {
        let all = Variant::all();
        let name = |variant: &Variant| format!("{}:{}", variant.structure(), variant.name());
        for wanted in &self.variant {
            if !all.iter().any(|variant| name(variant) == *wanted) {
                let known: Vec<String> = all.iter().map(name).collect();
                return Err(format!("no variant `{wanted}`; there are {}", known.join(", ")).into());
            }
        }
        let wanted = |v: &Variant| self.variant.is_empty() || self.variant.contains(&name(v));
        Ok(all.into_iter().filter(wanted).collect())
    }
}

fn main() -> Outcome<()> {
    let args = Args::parse().complete();
    let folder = if args.test { "target/figures/smoke" } else { "target/figures" };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
    let folder = args.folder.clone().unwrap_or(folder);
    if args.costs || args.test {
        let Some(costs) = cost::measure(args.test)? else { return Ok(()) };
        cost::print(&costs);
        std::fs::create_dir_all(&folder)?;
        let head = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
        std::fs::write(folder.join("placement_costs.csv"), head + &cost::csv(&costs))?;
        if args.costs {
            return Ok(());
        }
    }
    if args.steps || args.test {
        let n = args.n.expect("filled in");
        steps::run(n, args.region(n), args.seed)?;
        if args.steps {
            return Ok(());
        }
    }
    if args.levels || args.test {
        let n = args.n.expect("filled in");
        levels::run(n, args.queries, args.region(n), args.seed, &folder)?;
        if args.levels {
            return Ok(());
        }
    }
    let mut saved = Saved::open(&folder, args.resume)?;
    for variant in args.variants()? {
        if !measure(&args, variant, &mut saved)? {
            return Ok(());
        }
    }
    let Saved { rows, layouts, .. } = &saved;
    check_answers(rows);
    report::print_points(rows);
    report::print_summary(rows);
    report::print_layouts(layouts);
    report::write(&folder, rows, layouts)
}

/// The points of a variant at a size of local memory that have not been measured.
fn missing(args: &Args, variant: Variant, local_pct: u64, saved: &Saved) -> Vec<Mix> {
    let n = args.n.expect("filled in");
    let mixes = args.alpha.iter().flat_map(|alpha| args.updates.iter().map(|u| (*alpha, *u)));
    let mixes = mixes.map(|(alpha, updates)| Mix {
        n,
        count: args.queries,
        alpha,
        updates,
        seed: args.seed,
    });
    mixes.filter(|mix| !saved.has(variant, local_pct, mix)).collect()
}

/// Measures all points of a variant that are missing, and of the one that it can be rearranged to;
/// `false` where userfaultfd is not permitted.
fn measure(args: &Args, variant: Variant, saved: &mut Saved) -> Outcome<bool> {
    let n = args.n.expect("filled in");
    let wanted = args.variants()?;
    let mut built: Option<(u64, Built)> = None;
    for &local_pct in &args.local {
        let points = missing(args, variant, local_pct, saved);
        if points.is_empty() {
            continue;
        }
        let (cache, purely_local) = run::division(variant, n, local_pct);
        // Without purely-local memory one container serves all sizes.
        if built.as_ref().is_none_or(|(local, _)| *local != purely_local) {
            drop(built.take());
            let Some(mut fresh) = run::build(variant, n, purely_local, args.region(n), args.seed)?
            else {
                return Ok(false);
            };
            saved.add_layout(fresh.layout(local_pct))?;
            eprintln!("{variant:?} L={local_pct} %: built in {:.1?}", fresh.built_in);
            fresh.fetches = args.fetch;
            built = Some((purely_local, fresh));
        }
        let (_, container) = built.as_mut().expect("just built");
        measure_points(container, variant, cache, local_pct, points, saved)?;
        if let Some(next) = variant.rearranges_to().filter(|next| wanted.contains(next)) {
            let points = missing(args, next, local_pct, saved);
            if !points.is_empty() {
                container.rearrange(next)?;
                saved.add_layout(container.layout(local_pct))?;
                measure_points(container, next, cache, local_pct, points, saved)?;
                built = None;
            }
        }
    }
    Ok(true)
}

fn measure_points(
    built: &mut Built,
    variant: Variant,
    cache: u64,
    local_pct: u64,
    points: Vec<Mix>,
    saved: &mut Saved,
) -> Outcome<()> {
    for mix in points {
        let point = built.measure(cache, local_pct, mix)?;
        eprintln!(
            "  {variant:?} alpha {} U {}: {} in + {} out, {:.2?}, page cache {} KiB",
            mix.alpha,
            mix.updates,
            point.pages_in,
            point.pages_out,
            point.took,
            point.cache >> 10,
        );
        saved.add_row(Row { variant, point })?;
    }
    Ok(())
}

/// All variants have read the same pairs.
fn check_answers(rows: &[Row]) {
    let mut sums: HashMap<String, u64> = HashMap::new();
    for Row { variant, point } in rows {
        let mix = format!("{:?}", point.mix);
        let sum = *sums.entry(mix).or_insert(point.sum);
        assert_eq!(point.sum, sum, "{variant:?} has read other pairs");
    }
}
