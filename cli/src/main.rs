//! `farheap`: command-line companion of the crate.
//!
//! `doctor` asks what this machine allows ([`probe`], [`place`]) and says what it means. The checks
//! are in [`checks`], their output in [`report`]; the profile for containers is of [`seccomp`]. `run` runs a program under a limit ([`run`]), after a
//! look at what kind of file it is ([`program`]) and where the preload library lies ([`library`]). `top` shows what a
//! running process does ([`top`]). `completions` and `man` are made from the arguments themselves ([`generate`]).

mod checks;
// The library's own, from the sources that are part of this package.
#[path = "../library/elf.rs"]
mod elf;
mod generate;
mod library;
mod place;
mod probe;
mod program;
mod report;
mod run;
mod seccomp;
mod top;

use clap::{CommandFactory, Parser, Subcommand, ValueHint};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit status when a check failed; 2 is clap's, for a command line it does not understand.
const EXIT_FAIL: u8 = 1;

/// Companion of farheap, a heap larger than RAM.
#[derive(Parser)]
#[command(name = "farheap", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(Doctor),
    Run(run::Run),
    Top(top::Top),
    Completions(generate::Completions),
    Man(generate::Man),
}

/// Says what this machine allows farheap to do, and which commands repair what is missing.
///
/// Every check is PASS, WARN (works, but slower or with a limitation) or FAIL (will not work).
/// Nothing is changed: a directory is tried with a temporary file that is removed, a device is
/// only read.
#[derive(clap::Args)]
#[command(after_help = "Exit status:
  0  usable: no check failed (with --strict: none failed or warned)
  1  a check failed (with --strict: failed or warned)
  2  the command line is wrong

Without --device, --dir and --config, the configuration in FARHEAP_CONF is checked.

A profile of --seccomp is for x86-64 and containers without added capabilities:
  farheap doctor --seccomp --base default.json >farheap.json
  docker run --security-opt seccomp=farheap.json --device /dev/userfaultfd IMAGE")]
struct Doctor {
    /// Block device, file or server (nbd://HOST/EXPORT) that is to keep evicted pages; only read, never written
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    device: Option<PathBuf>,
    /// Directory for the temporary file that is to keep evicted pages
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
    /// Configuration to check instead of FARHEAP_CONF, such as `far_limit:1GiB`
    #[arg(long, value_name = "TEXT")]
    config: Option<String>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Let warnings count as failures in the exit status
    #[arg(long)]
    strict: bool,
    /// Print without colours, as when the output is not a terminal or NO_COLOR is set
    #[arg(long)]
    no_color: bool,
    /// Print a seccomp profile for containers instead: --base, and the system calls of farheap that it lacks. Without
    /// --base, these calls
    #[arg(long, conflicts_with_all = ["device", "dir", "config", "json", "strict", "no_color"])]
    seccomp: bool,
    /// Profile to add to, such as the container runtime's default; - is standard input
    #[arg(long, value_name = "FILE", requires = "seccomp", value_hint = ValueHint::FilePath)]
    base: Option<PathBuf>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(options) => doctor(&options),
        Command::Run(options) => return run::run(&options),
        Command::Top(options) => return top::top(&options),
        Command::Completions(options) => generate::completions(&options, Cli::command()),
        Command::Man(options) => generate::man(&options, Cli::command()),
    };
    match outcome {
        Ok(code) => code,
        // The reader of a pipe may stop early (`farheap doctor | head`).
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farheap: {error}");
            ExitCode::from(EXIT_FAIL)
        }
    }
}

/// Prints a seccomp profile.
fn seccomp(base: Option<&Path>) -> std::io::Result<ExitCode> {
    let profile = match base {
        None => seccomp::needed(),
        Some(path) => {
            let in_file =
                |error: &dyn Display| std::io::Error::other(format!("{}: {error}", path.display()));
            let text = if path.as_os_str() == "-" {
                std::io::read_to_string(std::io::stdin())
            } else {
                std::fs::read_to_string(path)
            };
            let text = text.map_err(|error| in_file(&error))?;
            seccomp::added_to(&text).map_err(|error| in_file(&error))?
        }
    };
    writeln!(std::io::stdout().lock(), "{profile:#}")?;
    Ok(ExitCode::SUCCESS)
}

fn doctor(options: &Doctor) -> std::io::Result<ExitCode> {
    if options.seccomp {
        return seccomp(options.base.as_deref());
    }
    let checks = checks::run(&checks::Subject {
        device: options.device.clone(),
        dir: options.dir.clone(),
        config: options.config.clone(),
    });
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{:#}", report::json(&checks))?;
    } else {
        let plain = options.no_color
            || !out.is_terminal()
            || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        write!(out, "{}", report::table(&checks, !plain))?;
    }
    let bad = if options.strict { checks::Verdict::Warn } else { checks::Verdict::Fail };
    let failed = checks.iter().any(|check| check.verdict >= bad);
    Ok(if failed { ExitCode::from(EXIT_FAIL) } else { ExitCode::SUCCESS })
}
