//! Far memory on servers: the client beside a bare loop, copies and parity, faults, and the same server as a disk.
//!
//! ```text
//! cargo bench --bench network                          # some minutes
//! cargo bench --bench network -- --server nbdkit       # one kind of server
//! cargo bench --bench network -- --test                # does it work? seconds
//! ```
//! Servers are nbdkit and qemu-storage-daemon, each with 256 MiB of memory on a Unix socket; one that is not installed is
//! said to be left out. Baselines take turns with the client, five rounds of them:
//!
//! | baseline | |
//! |---|---|
//! | bare loop | one connection, one call for a request, replies through a buffer of 256 KiB; looks at nothing that it need not |
//! | nbdfuse and loop | the same server as a file (nbdfuse), as a loop device, by as many threads as requests at once (root) |
//! | one server | the client with one server instead of several |
//!
//! What is read is compared with what was written. Whole programs on servers: `programs -- --servers`.

#[path = "../../network/tests/common/mod.rs"]
mod common;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/process.rs"]
#[expect(dead_code, reason = "this benchmark counts no processor time")]
mod process;
#[path = "../common/table.rs"]
mod table;

mod bare;
mod client;
mod disk;
mod far;
#[path = "../common/servers.rs"]
mod servers;

use bare::Bare;
use clap::Parser;
use client::Ours;
use common::{PATIENT, striped};
use disk::Disk;
use failure::{Failure, Result};
use far::Far;
use servers::{Kind, Server};
use std::process::ExitCode;
use table::Row;

/// Bytes of a request, but where a row says so.
const LEN: usize = 16 << 10;
/// Memory of a server.
const MIB: u64 = 256;
/// Places of requests.
const PLACES: u64 = (128 << 20) / LEN as u64;
/// A page, as faults read it.
const PAGE: usize = 4096;
/// Microseconds that a fault may take beyond a bare read: the trap, the handler, and the page's way into its place.
const FAULT_EXTRA_US: f64 = 25.0;

/// Far memory on servers beside a bare client, a disk, and one server.
#[derive(Debug, Parser)]
#[command(name = "network")]
struct Args {
    /// Only groups whose names contain one of these: requests, faults, copies, parity, apart.
    words: Vec<String>,
    /// Kinds of servers; all that are installed by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    server: Vec<Kind>,
    /// Rounds of each side.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// A smoke run of seconds.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn count(&self) -> u64 {
        if self.test { 300 } else { 40_000 }
    }

    /// A row of two sides that take turns.
    fn turns(&self, row: &Compared<'_>, ours: Side<'_>, base: Side<'_>) -> Result<Row> {
        let (mut values, mut bases) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds.max(1) {
            process::check_interrupt()?;
            bases.push(base()?);
            values.push(ours()?);
        }
        let work = (row.work.clone(), row.unit);
        Ok(Row::of_rounds(work, values, (row.baseline.to_owned(), bases), row.ratio, row.goal))
    }
}

/// A round of one side: its figure.
type Side<'a> = &'a mut dyn FnMut() -> Result<f64>;

/// A row before it is measured.
struct Compared<'a> {
    work: String,
    unit: &'static str,
    baseline: &'a str,
    ratio: fn(f64, f64) -> f64,
    goal: Option<f64>,
}

/// More is better.
fn rate(value: f64, base: f64) -> f64 {
    value / base
}

/// Less is better.
fn time(value: f64, base: f64) -> f64 {
    base / value
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    // `cargo test --benches` passes nothing and wants to be quick.
    args.test |= !args.bench;
    if args.test {
        args.rounds = 1;
    }
    process::catch_interrupts();
    failure::end("network", run(&args))
}

/// Measures a group of rows.
type Part = fn(&Args, Kind, &mut Vec<Row>) -> Result<()>;

fn run(args: &Args) -> Result<()> {
    let kinds = if args.server.is_empty() { &Kind::ALL[..] } else { &args.server[..] };
    table::print_heading();
    let mut rows = Vec::new();
    for kind in kinds {
        let parts: [(&str, Part); 5] = [
            ("requests", requests),
            ("faults", faults),
            ("copies", copies),
            ("parity", parity),
            ("apart", apart),
        ];
        let wanted = |name: &str| {
            args.words.is_empty() || args.words.iter().any(|word| name.contains(word.as_str()))
        };
        for (_, part) in parts.into_iter().filter(|(name, _)| wanted(name)) {
            match part(args, *kind, &mut rows) {
                Err(Failure::Skipped(why)) => println!("skipped: {}: {why}", kind.name()),
                other => other?,
            }
            table::write("network", &rows, args.test)?;
        }
    }
    if rows.is_empty() {
        return Err(Failure::Skipped("no server is installed".to_owned()));
    }
    table::print_goals(&rows);
    let folder = table::write("network", &rows, args.test)?;
    println!("written: network.csv, network.svg in {}", folder.display());
    Ok(())
}

fn add(rows: &mut Vec<Row>, group: &str, new: Vec<Row>) {
    table::print_group(group, &new);
    rows.extend(new);
}

/// Requests of the client beside a bare loop, and beside the server as a disk.
fn requests(args: &Args, kind: Kind, rows: &mut Vec<Row>) -> Result<()> {
    let server = Server::start(kind, MIB)?;
    let mut bare = Bare::connect(&server, LEN)?;
    let mut ours = Ours::connect(&[&server]);
    ours.fill();
    let disk = disk_of(&server);
    let mut new = Vec::new();
    for is_read in [true, false] {
        let what = if is_read { "reads" } else { "writes" };
        for depth in [1, 8, 32] {
            let goal = (depth == 32).then_some(0.9);
            let work = format!("{}: {what} of 16 KiB, {depth} at once", kind.name());
            let row = Compared { work, unit: "1/s", baseline: "bare loop", ratio: rate, goal };
            let count = args.count();
            new.push(args.turns(&row, &mut || Ok(ours.run(is_read, depth, count)), &mut || {
                bare.run(is_read, depth, count)
            })?);
            if let Some(disk) = &disk {
                let row = Compared { baseline: "nbdfuse and loop", goal: None, ..row };
                let count = count / 10; // It is slow.
                new.push(args.turns(
                    &row,
                    &mut || Ok(ours.run(is_read, depth, count)),
                    &mut || disk.run(is_read, depth, count),
                )?);
            }
        }
    }
    add(rows, kind.name(), new);
    Ok(())
}

/// The server as a disk, or why there is none.
fn disk_of(server: &Server) -> Option<Disk> {
    Disk::create(server).map_err(|why| println!("skipped: nbdfuse and loop: {why}")).ok()
}

/// Faults of one thread beside bare reads of a page, and beside faults on the server as a disk.
fn faults(args: &Args, kind: Kind, rows: &mut Vec<Row>) -> Result<()> {
    let servers = (0..4).map(|_| Server::start(kind, MIB)).collect::<Result<Vec<_>>>()?;
    let [of_far, of_thread, of_bare, of_disk] = &servers[..] else { unreachable!("four started") };
    let mut bare = Bare::connect(of_bare, PAGE)?;
    let count = args.count() / 4;
    let mut new = Vec::new();
    let row = |what: &str, baseline| Compared {
        work: format!("{}: a fault{what}, p50", kind.name()),
        unit: "us",
        baseline,
        ratio: time,
        goal: None,
    };
    for (what, server, more) in
        [(" in its own thread", of_thread, ",mode:in_thread"), ("", of_far, "")]
    {
        let far = Far::on_server(server, more)?;
        let row_of = |baseline| row(what, baseline);
        let row = Compared {
            ratio: |value, base| (base + FAULT_EXTRA_US) / value,
            goal: Some(1.0),
            ..row_of("a bare read of 4 KiB, and 25 us")
        };
        new.push(args.turns(&row, &mut || far.p50(count), &mut || bare.p50(count))?);
        if more.is_empty() {
            let file = Far::on_file()?;
            let row = row_of("the default file");
            new.push(args.turns(&row, &mut || far.p50(count), &mut || file.p50(count))?);
            drop(file);
            if let Some(disk) = disk_of(of_disk) {
                let on_disk = Far::on_disk(disk.path())?;
                let row = row_of("nbdfuse and loop");
                new.push(args.turns(&row, &mut || far.p50(count), &mut || on_disk.p50(count))?);
            }
        }
        far.end()?;
    }
    add(rows, kind.name(), new);
    Ok(())
}

/// Writes to several servers beside those to one.
fn writes(kind: Kind, what: &str) -> Compared<'static> {
    Compared {
        work: format!("{}: writes of 16 KiB {what} at once", kind.name()),
        unit: "1/s",
        baseline: "one server",
        ratio: rate,
        goal: None,
    }
}

/// Two copies beside one server.
fn copies(args: &Args, kind: Kind, rows: &mut Vec<Row>) -> Result<()> {
    let servers = (0..3).map(|_| Server::start(kind, MIB)).collect::<Result<Vec<_>>>()?;
    let count = args.count();
    let mut one = Ours::connect(&[&servers[0]]);
    let mut both = Ours::connect(&[&servers[1], &servers[2]]);
    // As fast as processors are, which both servers share: twice the work.
    let row = writes(kind, "to two copies, 32");
    let new = args.turns(&row, &mut || Ok(both.run(false, 32, count)), &mut || {
        Ok(one.run(false, 32, count))
    })?;
    add(rows, kind.name(), vec![new]);
    Ok(())
}

/// Pages with parity over six servers of which two may be lost, beside one server.
fn parity(args: &Args, kind: Kind, rows: &mut Vec<Row>) -> Result<()> {
    let servers = (0..12).map(|_| Server::start(kind, MIB)).collect::<Result<Vec<_>>>()?;
    let (count, name) = (args.count(), kind.name());
    let (singles, servers) = servers.split_at(6);
    let mut singles: Vec<Ours> = singles.iter().map(|server| Ours::connect(&[server])).collect();
    // Not the one that is measured beside them: neither would find what it wrote.
    let addresses: Vec<_> = servers.iter().map(|server| server.address.clone()).collect();
    let mut parity = [Ours::of(striped(&addresses, 2, PATIENT))];
    parity[0].fill();
    singles.iter_mut().for_each(Ours::fill);
    let work = format!("{name}: reads of 4 KiB with parity 4+2, p99");
    let (goal, ratio) = (Some(1.0 / 1.2), time as fn(f64, f64) -> f64);
    let row = Compared { work, unit: "us", baseline: "one server", ratio, goal };
    let mut new = vec![args.turns(&row, &mut || Ok(Ours::p99(&mut parity, count)), &mut || {
        Ok(Ours::p99(&mut singles[..1], count))
    })?];
    // Each of several processes finds less of its code and data in caches than one that answers all.
    let row = Compared { baseline: "six servers, one page on each", goal: None, ..row };
    new.push(args.turns(&row, &mut || Ok(Ours::p99(&mut parity, count)), &mut || {
        Ok(Ours::p99(&mut singles, count))
    })?);
    let ([parity], one) = (&mut parity, &mut singles[0]);
    for depth in [1, 32] {
        let row = writes(kind, &format!("with parity 4+2, {depth}"));
        new.push(args.turns(&row, &mut || Ok(parity.run(false, depth, count)), &mut || {
            Ok(one.run(false, depth, count))
        })?);
    }
    add(rows, name, new);
    Ok(())
}

/// Two copies beside one server, on servers that take their time, as those of another machine do: not the processors of
/// this one are measured.
fn apart(args: &Args, kind: Kind, rows: &mut Vec<Row>) -> Result<()> {
    if kind != Kind::Nbdkit {
        return Ok(()); // Only it can wait.
    }
    let start = || Server::start_with(kind, MIB, &["--filter=delay", "wdelay=1ms"]);
    let servers = (0..3).map(|_| start()).collect::<Result<Vec<_>>>()?;
    let mut one = Ours::connect(&[&servers[0]]);
    let mut both = Ours::connect(&[&servers[1], &servers[2]]);
    let mut new = Vec::new();
    for depth in [1, 8, 32] {
        let name = kind.name();
        let work = format!("{name}, 1 ms away: writes of 16 KiB to two copies, {depth} at once");
        let goal = Some(1.0 / 1.15);
        let row = Compared { work, unit: "1/s", baseline: "one server", ratio: rate, goal };
        let count = args.count() / 100 * depth as u64;
        new.push(args.turns(&row, &mut || Ok(both.run(false, depth, count)), &mut || {
            Ok(one.run(false, depth, count))
        })?);
    }
    add(rows, kind.name(), new);
    Ok(())
}
