//! What allocating costs, against jemalloc itself in the same run.
//!
//! `cargo bench --bench heap` prints a table and writes `target/figures/heap.csv` and `heap.svg`;
//! `-- --test` runs every work once, checks it and writes nothing; other words choose the works
//! whose names contain one of them.
//!
//! The heap that is measured is the one a program starts, with a limit that nothing reaches: what
//! it costs while everything fits. Allocators take turns; a value is the median of the rounds, a
//! ratio the median of the rounds' ratios.

#![expect(unsafe_code, reason = "allocates by hand")]

#[path = "common/bare.rs"]
mod bare;

use bare::Bare;
use farheap::{ByteCount, Config, Far, FarHeap, Heap, Placement, scope};
use plotters::prelude::*;
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;
use std::{fs, thread};

/// Rounds of each work and allocator.
const ROUNDS: usize = 7;

/// Speed against jemalloc that we want, as a ratio.
const GOAL: f64 = 0.97;

/// What is allocated and freed.
#[derive(Clone, Copy)]
enum Work {
    /// One block at a time.
    Pair { size: usize },
    /// A random one of `live` blocks is replaced by one of a random size.
    Churn { from: usize, to: usize, live: usize, threads: usize },
}

/// A work's figures: nanoseconds per allocation and its free, medians of the rounds.
struct Figure {
    work: Work,
    far_ns: f64,
    local_ns: f64,
    bare_ns: f64,
    /// jemalloc's time over ours, medians of the rounds.
    far_ratio: f64,
    local_ratio: f64,
}

fn works() -> Vec<Work> {
    let mut works: Vec<Work> = (4..=20).map(|log| Work::Pair { size: 1 << log }).collect();
    for threads in [1, 2] {
        works.extend([
            Work::Churn { from: 16, to: 1 << 10, live: 10_000, threads },
            Work::Churn { from: 1, to: 16 << 10, live: 10_000, threads },
            Work::Churn { from: 16 << 10, to: 256 << 10, live: 1_000, threads },
            Work::Churn { from: 64 << 10, to: 1 << 20, live: 100, threads },
        ]);
    }
    works
}

impl Work {
    fn name(self) -> String {
        match self {
            Work::Pair { size } => format!("pair {}", short(size)),
            Work::Churn { from, to, live: _, threads } => {
                let plural = if threads == 1 { "thread" } else { "threads" };
                format!("churn {}-{} {threads} {plural}", short(from), short(to))
            }
        }
    }

    /// Runs the work `count` times; returns nanoseconds each.
    fn run(self, alloc: &(impl GlobalAlloc + Sync), far: bool, count: usize) -> f64 {
        let placement = if far { Placement::Far } else { Placement::Local };
        let body = |threads: usize| {
            let _scope = scope(placement);
            match self {
                Work::Pair { size } => pairs(alloc, far, size, count),
                Work::Churn { from, to, live, .. } => {
                    churn(alloc, far, (from, to), live, count / threads);
                }
            }
        };
        let threads = match self {
            Work::Pair { .. } => 1,
            Work::Churn { threads, .. } => threads,
        };
        let start = Instant::now();
        if threads == 1 {
            body(1);
        } else {
            thread::scope(|all| (0..threads).for_each(|_| drop(all.spawn(|| body(threads)))));
        }
        start.elapsed().as_nanos() as f64 / count as f64
    }
}

fn pairs(alloc: &impl GlobalAlloc, far: bool, size: usize, count: usize) {
    let layout = black_box(Layout::from_size_align(size, 8).expect("a valid layout"));
    assert_eq!(Far::contains(Block::new(alloc, layout).ptr), far);
    for _ in 0..count {
        // SAFETY: the layout is not empty.
        let ptr = black_box(unsafe { alloc.alloc(layout) });
        // SAFETY: just allocated, not empty.
        unsafe { ptr.write(1) };
        // SAFETY: allocated above with this layout.
        unsafe { alloc.dealloc(ptr, layout) };
    }
}

fn churn(
    alloc: &impl GlobalAlloc,
    far: bool,
    (from, to): (usize, usize),
    live: usize,
    count: usize,
) {
    let mut random = 0x2545_F491_4F6C_DD1D_u64;
    let mut blocks: Vec<Option<Block<_>>> = (0..live).map(|_| None).collect();
    for _ in 0..count {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let place = &mut blocks[random as usize % live];
        *place = None;
        let size = from + (random >> 32) as usize % (to - from);
        let layout = Layout::from_size_align(size, 8).expect("a valid layout");
        *place = Some(Block::new(alloc, layout));
    }
    assert!(blocks.iter().flatten().all(|block| Far::contains(block.ptr) == far));
}

/// A block with its first byte written.
struct Block<'a, A: GlobalAlloc> {
    alloc: &'a A,
    ptr: *mut u8,
    layout: Layout,
}

impl<'a, A: GlobalAlloc> Block<'a, A> {
    #[inline]
    fn new(alloc: &'a A, layout: Layout) -> Block<'a, A> {
        // SAFETY: the works have no empty layouts.
        let ptr = unsafe { alloc.alloc(layout) };
        assert!(!ptr.is_null());
        // SAFETY: just allocated, not empty.
        unsafe { ptr.write(1) };
        Block { alloc, ptr, layout }
    }
}

impl<A: GlobalAlloc> Drop for Block<'_, A> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { self.alloc.dealloc(self.ptr, self.layout) };
    }
}

/// A size in words.
fn short(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

fn measure(work: Work, rounds: usize, count: usize) -> Figure {
    let heap = FarHeap::new();
    let [mut bare, mut local, mut far] = [const { Vec::<f64>::new() }; 3];
    // One round to warm up.
    for round in 0..=rounds {
        let times = [work.run(&Bare, false, count), work.run(&heap, false, count)];
        let last = work.run(&heap, true, count);
        if round > 0 {
            bare.push(times[0]);
            local.push(times[1]);
            far.push(last);
        }
    }
    let ratio = |ours: &[f64]| median(bare.iter().zip(ours).map(|(bare, ns)| bare / ns).collect());
    let (far_ratio, local_ratio) = (ratio(&far), ratio(&local));
    let (far_ns, local_ns, bare_ns) = (median(far), median(local), median(bare));
    Figure { work, far_ns, local_ns, bare_ns, far_ratio, local_ratio }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

fn print(figures: &[Figure]) {
    println!("Nanoseconds per allocation and its free, medians of {ROUNDS} rounds in turns.\n");
    println!(
        "{:<30} {:>10} {:>10} {:>10} {:>12} {:>12}",
        "work", "jemalloc", "local", "far", "local ratio", "far ratio"
    );
    for figure in figures {
        let Figure { work, far_ns, local_ns, bare_ns, far_ratio, local_ratio } = figure;
        let name = work.name();
        println!(
            "{name:<30} {bare_ns:>10.1} {local_ns:>10.1} {far_ns:>10.1} {local_ratio:>12.2} \
             {far_ratio:>12.2}"
        );
    }
}

fn csv(figures: &[Figure]) -> String {
    let mut text = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for figure in figures {
        let tiers = [
            ("far", figure.far_ns, figure.far_ratio),
            ("local", figure.local_ns, figure.local_ratio),
        ];
        for (tier, ns, ratio) in tiers {
            let (name, bare) = (figure.work.name(), figure.bare_ns);
            text += &format!("{name} {tier},{ns:.2},ns,jemalloc,{bare:.2},{ratio:.3},{GOAL}\n");
        }
    }
    text
}

fn draw(figures: &[Figure], path: &Path) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, (1000, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let most = figures.iter().map(|figure| figure.bare_ns.max(figure.far_ns)).fold(10.0, f64::max);
    let names: Vec<String> = figures.iter().map(|figure| figure.work.name()).collect();
    let mut chart = ChartBuilder::on(&root)
        .caption("Allocate and free: far memory against jemalloc", ("sans-serif", 22))
        .margin(15)
        .x_label_area_size(190)
        .y_label_area_size(70)
        .build_cartesian_2d(0..figures.len(), (1.0..most * 1.2).log_scale())?;
    chart
        .configure_mesh()
        .x_labels(figures.len())
        .x_label_formatter(&|index| names.get(*index).cloned().unwrap_or_default())
        .x_label_style(("sans-serif", 13).into_font().transform(FontTransform::Rotate90))
        .y_desc("ns per pair (log)")
        .draw()?;
    type Value = fn(&Figure) -> f64;
    let series: [(&str, RGBColor, Value); 3] = [
        ("jemalloc", BLACK, |figure| figure.bare_ns),
        ("FarHeap, local", BLUE, |figure| figure.local_ns),
        ("FarHeap, far", RED, |figure| figure.far_ns),
    ];
    for (name, color, value) in series {
        let points = figures.iter().map(value).enumerate();
        chart
            .draw_series(points.map(|point| Circle::new(point, 4, color.filled())))?
            .label(name)
            .legend(move |(x, y)| Circle::new((x + 10, y), 4, color.filled()));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE)
        .border_style(BLACK)
        .position(SeriesLabelPosition::UpperLeft)
        .draw()?;
    root.present()?;
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let test = std::env::args().any(|argument| argument == "--test");
    let config = Config::builder().far_limit(ByteCount::gib(2)).build()?;
    let heap = match Heap::start(config) {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let (rounds, count) = if test { (1, 2_000) } else { (ROUNDS, 200_000) };
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let chosen = |work: &Work| {
        words.is_empty() || words.iter().any(|word| work.name().contains(word.as_str()))
    };
    let figures: Vec<Figure> =
        works().into_iter().filter(chosen).map(|work| measure(work, rounds, count)).collect();
    let stats = heap.stats();
    assert_eq!(stats.bytes_written.0 + stats.bytes_read.0, 0, "everything fits");
    // Also the check that nothing was lost.
    heap.shutdown()?;
    if test {
        println!("heap: {} works ran", figures.len());
        return Ok(());
    }
    print(&figures);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/figures");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("heap.csv"), csv(&figures))?;
    draw(&figures, &folder.join("heap.svg"))?;
    println!("\nwritten: heap.csv, heap.svg in {}", folder.display());
    Ok(())
}
