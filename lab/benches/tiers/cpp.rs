//! The same figures by a store in C++: `ffi/examples/chunks.cpp`, in the manner of Hyrise, on `farheap.hpp` alone.
//!
//! Built here, with g++ and the library of this build's profile. It runs as a process of its own, with metadata separated
//! and together with the data in turns.

use crate::Options;
use crate::failure::{Failure, Result};
use crate::table::Row;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const NATIVE: &[&str] = &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// What a run told.
struct Told {
    far_mib: f64,
    migration_mib_per_s: f64,
    metadata_percent: f64,
    /// Seconds of all queries, in RAM and far.
    ram: f64,
    far: f64,
}

/// All rows; a machine that cannot build it is told.
pub(crate) fn rows(options: &Options, rows: &mut Vec<Row>) -> Result<()> {
    let measured = build(options).and_then(|program| measure(options, &program));
    match measured {
        Ok(new) => crate::add("C++", rows, new, options),
        Err(Failure::Skipped(why)) => {
            println!("  skipped: C++: {why}");
            Ok(())
        }
        Err(failure) => Err(failure),
    }
}

fn measure(options: &Options, program: &Path) -> Result<Vec<Row>> {
    const SMALL: f64 = 0.02;
    let scale = if options.test { SMALL } else { options.scale_factor };
    let small = run(program, options, SMALL, "far_limit:8MiB")?;
    let limit = (small.far_mib / SMALL * scale * options.cache as f64 / 100.0).max(8.0);
    let [mut separated, mut together]: [Vec<Told>; 2] = [const { Vec::new() }; 2];
    for _ in 0..options.rounds {
        for (told, switch) in [(&mut separated, "off"), (&mut together, "on")] {
            let conf = format!("far_limit:{limit:.0}MiB,far_metadata:{switch}");
            told.push(run(program, options, scale, &conf)?);
        }
    }
    let all = |told: &[Told], of: fn(&Told) -> f64| -> Vec<f64> { told.iter().map(of).collect() };
    let row = |work: &str, unit, values, base: &str, bases| {
        let work = (format!("C++ {work}, scale factor {scale}"), unit);
        let less = |value: f64, base: f64| base / value;
        Row::of_rounds(work, values, (base.to_owned(), bases), less, None)
    };
    let migration = |told: &Told| told.far_mib / told.migration_mib_per_s;
    Ok(vec![
        row("queries", "s", all(&separated, |told| told.far), "DRAM", all(&separated, |t| t.ram)),
        row(
            "metadata",
            "% of the data",
            all(&separated, |told| told.metadata_percent),
            "1 %",
            vec![1.0; separated.len()],
        ),
        row(
            "queries separated",
            "s",
            all(&separated, |told| told.far),
            "metadata in the tier",
            all(&together, |told| told.far),
        ),
        row(
            "migration separated",
            "s",
            all(&separated, migration),
            "metadata in the tier",
            all(&together, migration),
        ),
    ])
}

/// Builds the program beside its library, unless it is newer than all that it is made of.
///
/// # Errors
/// [`Failure::Skipped`] without a compiler.
fn build(options: &Options) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of the workspace");
    let me = std::env::current_exe().map_err(Failure::io)?;
    // PROFILE/deps/tiers-HASH
    let dir = me.ancestors().nth(2).expect("cargo builds into two directories");
    // A smoke run takes what the tests were linked with.
    let built = if options.test { newest_library(dir) } else { None };
    let library = built.map_or_else(|| library(root, dir), Ok)?;
    let program = dir.join("tiers_chunks");
    let headers = ["ffi/include/farheap.h", "ffi/include/farheap.hpp", "ffi/examples/chunks.hpp"];
    let source = root.join("ffi/examples/chunks.cpp");
    let changed = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    let sources = headers.map(|name| root.join(name)).into_iter();
    let last = sources.chain([library.clone(), source.clone()]).map(|path| changed(&path)).max();
    if changed(&program) > last.flatten() {
        return Ok(program);
    }
    let mut compile = Command::new("g++");
    compile.args(["-std=c++17", "-O2", "-I"]).arg(root.join("ffi/include"));
    compile.args([source, library]).arg("-Wl,--strip-debug").args(NATIVE).arg("-o").arg(&program);
    let output = compile.output().map_err(|error| Failure::Skipped(format!("g++: {error}")))?;
    match output.status.success() {
        true => Ok(program),
        false => Err(Failure::Broken(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

/// The static library that was built last into a profile's directory.
fn newest_library(dir: &Path) -> Option<PathBuf> {
    let entries = [dir.to_owned(), dir.join("deps")].into_iter().flat_map(|dir| dir.read_dir());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libfarheap_ffi") && name.ends_with(".a")
    };
    paths
        .filter(is_library)
        .max_by_key(|path| path.metadata().and_then(|file| file.modified()).ok())
}

/// The static library of the profile that this benchmark was built with, made now.
fn library(root: &Path, dir: &Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.current_dir(root).args(["build", "--quiet", "--package", "farheap-ffi", "--lib"]);
    build.arg("--target-dir").arg(dir.parent().expect("a profile is below the target directory"));
    if !dir.ends_with("debug") {
        build.arg("--release");
    }
    let status = build.stdin(Stdio::null()).status().map_err(Failure::io)?;
    match status.success() {
        true => Ok(dir.join("libfarheap_ffi.a")),
        false => Err(Failure::Broken(format!("the library was not built: {status}"))),
    }
}

fn run(program: &Path, options: &Options, scale: f64, conf: &str) -> Result<Told> {
    let dir =
        options.dir.as_ref().map_or_else(String::new, |dir| format!(",dir:{}", dir.display()));
    let mut command = Command::new(program);
    command.args(["--scale", &scale.to_string(), "--far", &format!("{conf}{dir}")]);
    let output = command.stdin(Stdio::null()).output().map_err(Failure::io)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if let Some((_, why)) = text.split_once("skipped: ") {
        return Err(Failure::Skipped(why.trim().to_owned()));
    }
    let told = output.status.success().then(|| told(&text)).flatten();
    told.ok_or_else(|| Failure::Broken(format!("chunks {conf}: {}: {text}", output.status)))
}

/// Takes a line of three numbers and a table of queries apart.
fn told(text: &str) -> Option<Told> {
    let number = |text: &str| text.trim_end_matches(',').parse::<f64>().ok();
    let first = text.lines().find(|line| line.contains("metadata takes"))?;
    let numbers: Vec<f64> = first.split(' ').filter_map(number).collect();
    let &[far_mib, migration_mib_per_s, metadata_percent] = &numbers[..] else { return None };
    let queries = text.lines().skip_while(|line| !line.starts_with("query,")).skip(1);
    let times = queries.map_while(|line| {
        let fields: Vec<f64> = line.split(',').filter_map(number).collect();
        <[f64; 4]>::try_from(fields).ok()
    });
    let times: Vec<[f64; 4]> = times.collect();
    let sum = |at: usize| times.iter().map(|fields| fields[at]).sum();
    let told = Told { far_mib, migration_mib_per_s, metadata_percent, ram: sum(1), far: sum(2) };
    (!times.is_empty()).then_some(told)
}
