//! Rows of TPC-H: each side in a process of its own, its time normalised to DRAM in the same process.
//!
//! | rows | the paper's |
//! |---|---|
//! | how much a read brings | Figure 5, whose page sizes are that, but for jemalloc's `retain`, which far arenas need |
//! | metadata and retained addresses of a migration | Figure 6 |
//! | metadata in the tier, and separated | Figure 7 (module `separation`) |
//! | a loop device, a server, a mapped file | beyond it |

use crate::child::Side;
use crate::failure::{Failure, Result};
use crate::group::{MemoryGroup, tool};
use crate::servers::{Kind, Server};
use crate::table::{Row, median};
use crate::{Options, broken};
use farheap::ByteCount;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// How much a read brings, as the rows name it: the default, and without reading ahead.
const READS: [(&str, &str); 2] = [("2 MiB", ""), ("4 KiB", ",readahead:off")];

/// What a child told.
#[derive(Clone, Debug)]
pub(crate) struct Told(HashMap<String, f64>);

impl Told {
    pub(crate) fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(f64::NAN)
    }

    /// Seconds of a pass, of those in DRAM.
    fn slowdown(&self) -> f64 {
        self.get("tier") / self.get("dram")
    }
}

/// All rows; what cannot be had here is told and left out.
pub(crate) fn rows(options: &Options, rows: &mut Vec<Row>) -> Result<()> {
    let bytes = bytes(options)?;
    let cache = ByteCount(bytes * options.cache / 100).max(ByteCount::mib(8));
    println!(
        "tpch: scale factor {}, {} of columns, cache {cache}",
        options.scale_factor,
        ByteCount(bytes)
    );
    let job = Job { options, cache };
    let mut slowdown = None;
    for (size, more) in READS {
        let what = format!("{size} a read");
        let Some(on) = job.side(&what, Side::Far, &job.conf(more))? else { return Ok(()) };
        let mut new = vec![on_tier(&what, &on)];
        if slowdown.is_none() {
            new.extend(memory(&on));
            slowdown = Some(median(on.iter().map(Told::slowdown).collect()));
        }
        job.add(rows, new)?;
    }
    let slowdown = slowdown.expect("both were measured");
    if let Some(mapped) = job.side("a mapped file", Side::Mmap, "")? {
        job.add(rows, vec![beside_mmap(slowdown, &mapped)])?;
    }
    job.devices(rows)
}

/// Bytes of the columns.
fn bytes(options: &Options) -> Result<u64> {
    match crate::load::Plan::count(options.scale_factor).bytes().get() {
        0 => Err(Failure::Broken("there are no rows at this scale factor".to_owned())),
        bytes => Ok(bytes),
    }
}

fn on_tier(what: &str, told: &[Told]) -> Row {
    let name = (format!("tpch {what}"), "s");
    let all = |name: &str| told.iter().map(|told| told.get(name)).collect();
    Row::of_rounds(
        name,
        all("tier"),
        ("DRAM".to_owned(), all("dram")),
        |tier, dram| dram / tier,
        None,
    )
}

/// Figure 6.
fn memory(told: &[Told]) -> Vec<Row> {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let of = |name: &str| -> Vec<f64> { told.iter().map(|told| mib(told.get(name))).collect() };
    let row = |work: &str, values: Vec<f64>, goal| {
        let hundredth = of("far").into_iter().map(|far| far / 100.0).collect();
        let bases = ("1 % of the data".to_owned(), hundredth);
        let ratio = |value: f64, base: f64| base / value.max(1e-3);
        Row::of_rounds((format!("tpch migration, {work}"), "MiB"), values, bases, ratio, goal)
    };
    vec![
        row("metadata", of("metadata"), Some(1.0)),
        row("retained addresses", of("retained"), None),
    ]
}

fn beside_mmap(slowdown: f64, mapped: &[Told]) -> Row {
    let name = ("tpch far".to_owned(), "of DRAM");
    let values = vec![slowdown; mapped.len()];
    let bases = ("mmap, memory group".to_owned(), mapped.iter().map(Told::slowdown).collect());
    Row::of_rounds(name, values, bases, |tier, mapped| mapped / tier, Some(1.0))
}

/// Runs children.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    /// Of the tier, or of the memory group.
    pub(crate) cache: ByteCount,
}

impl Job<'_> {
    pub(crate) fn conf(&self, more: &str) -> String {
        let dir = match &self.options.dir {
            Some(dir) if !more.contains("device:") => format!(",dir:{}", dir.display()),
            _ => String::new(),
        };
        format!("far_limit:{}{more}{dir}", self.cache.get())
    }

    fn add(&self, rows: &mut Vec<Row>, new: Vec<Row>) -> Result<()> {
        crate::add("tpch", rows, new, self.options)
    }

    /// All rounds of one side; `None`: the machine does not allow it, which is told.
    fn side(&self, what: &str, side: Side, conf: &str) -> Result<Option<Vec<Told>>> {
        let rounds = (0..self.options.rounds).map(|_| self.run(side, conf));
        match rounds.collect::<Result<Vec<Told>>>() {
            Ok(told) => Ok(Some(told)),
            Err(Failure::Skipped(why)) => {
                println!("  skipped: {what}: {why}");
                Ok(None)
            }
            Err(failure) => Err(Failure::Broken(format!("{what}: {failure}"))),
        }
    }

    /// One round of a side.
    pub(crate) fn run(&self, side: Side, conf: &str) -> Result<Told> {
        let me = std::env::current_exe().map_err(Failure::io)?;
        let name = match side {
            Side::Far => "far",
            Side::Mmap => "mmap",
            Side::Auto => "auto",
        };
        let mut command = Command::new(me);
        command.args(["--bench", "--child", name, "--conf", conf]);
        command.args(["--scale-factor", &self.options.scale_factor.to_string()]);
        command.args(["--passes", &self.options.passes.to_string()]);
        command.args(["--budget", &self.cache.get().to_string()]);
        if let Some(dir) = &self.options.dir {
            command.arg("--dir").arg(dir);
        }
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Running { child: child.map_err(Failure::io)?, group: None }.told(self.cache)
    }

    /// The tier on other devices.
    fn devices(&self, rows: &mut Vec<Row>) -> Result<()> {
        let base = self.side("the file", Side::Far, &self.conf(""))?;
        let Some(base) = base else { return Ok(()) };
        let base: Vec<f64> = base.iter().map(Told::slowdown).collect();
        let size = ByteCount(self.cache.get() * 100 / self.options.cache.max(1) * 3 / 2);
        let on_loop = Device::on_loop(size);
        let server = Server::start(Kind::Nbdkit, size.get().div_ceil(1 << 20));
        let sides = [
            ("a loop device", on_loop.as_ref().map(|device| device.path.display().to_string())),
            ("a server", server.as_ref().map(|server| server.address.to_string())),
        ];
        for (what, device) in sides {
            let conf = device.map(|device| format!(",device:\"{device}\""));
            let told = match conf {
                Ok(more) => self.side(what, Side::Far, &self.conf(&more))?,
                Err(why) => {
                    println!("  skipped: {what}: {why}");
                    None
                }
            };
            if let Some(told) = told {
                let name = (format!("tpch on {what}"), "of DRAM");
                let values = told.iter().map(Told::slowdown).collect();
                let bases = ("the file".to_owned(), base.clone());
                let row = Row::of_rounds(name, values, bases, |value, base| base / value, None);
                self.add(rows, vec![row])?;
            }
        }
        Ok(())
    }
}

/// A child, killed when dropped.
struct Running {
    child: Child,
    /// Removed after the child has ended.
    group: Option<MemoryGroup>,
}

impl Running {
    /// Collects what the child says, until it has ended.
    fn told(mut self, cache: ByteCount) -> Result<Told> {
        let from = BufReader::new(self.child.stdout.take().expect("asked for when it started"));
        let mut to = self.child.stdin.take().expect("asked for when it started");
        let mut told = HashMap::new();
        for line in from.lines() {
            let line = line.map_err(Failure::io)?;
            let (name, value) = line.split_once(' ').unwrap_or((&line, ""));
            match name {
                "skipped" => return Err(Failure::Skipped(value.to_owned())),
                "failed" => return Err(Failure::Broken(value.to_owned())),
                "ready" => {
                    let overhead = told.get("overhead").copied().unwrap_or(0.0) as usize;
                    let group = MemoryGroup::create(cache.as_usize() + overhead, false)?;
                    group.add(self.child.id())?;
                    self.group = Some(group);
                    writeln!(to, "go").map_err(Failure::io)?;
                }
                _ => drop(told.insert(name.to_owned(), value.parse().map_err(broken)?)),
            }
        }
        let status = self.child.wait().map_err(Failure::io)?;
        if !status.success() || !told.contains_key("tier") {
            return Err(Failure::Broken(format!("ended early: {status}")));
        }
        Ok(Told(told))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A block device over a file, gone when dropped.
struct Device {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Device {
    fn on_loop(size: ByteCount) -> Result<Device> {
        let dir = tempfile::tempdir().map_err(Failure::io)?;
        let file = dir.path().join("disk");
        let made = std::fs::File::create_new(&file).and_then(|file| file.set_len(size.get()));
        made.map_err(Failure::io)?;
        let name = file.to_str().expect("the name is UTF-8");
        let path = tool("losetup", &["-f", "--show", "--direct-io=on", name])?.into();
        Ok(Device { path, _dir: dir })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        drop(tool("losetup", &["-d", self.path.to_str().expect("the name is ASCII")]));
    }
}
