//! `farheap run`: runs a program with the malloc family of `libfarheap_preload.so`.
//!
//! The options become `FARHEAP_CONF`, the library goes into `LD_PRELOAD`, and the program takes this
//! process's place, so that its exit status and signals are its own. Uses `library`, `program`.

use crate::library;
use crate::program::{self, RunRefusal};
use clap::ValueHint;
use farheap::Heap;
use farheap::config::Builder;
use farheap::region::FaultMode;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Exit statuses, as `env(1)` and `timeout(1)` have them.
const EXIT_REFUSED: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// How `farheap run` tells the library what it is to do.
const RUN_VARIABLE: &str = "FARHEAP_RUN";

/// Runs a program whose heap is far memory, under a limit on its resident memory.
///
/// The program is not changed or recompiled: its malloc is farheap's. Once it has 6 MiB in use, what
/// it allocates goes to far memory, whose cold pages leave for the device, and so does private memory that
/// it maps, from 256 KiB on. Code and constants leave where memory is short; stacks and other mappings cannot:
/// far memory gives way to them. A child of fork(2) has the far memory of its parent; what it allocates itself is not limited.
#[derive(clap::Args)]
#[command(after_help = "Exit status:
  125  farheap cannot do this: the configuration, permissions, or the kind of program
  126  the program cannot be executed
  127  the program is not found
  else the program's own; a signal that ends it ends this command

Sizes: 64M is 64MiB (2^26 bytes), 64MB is 64,000,000 bytes; so with K, G and T.

Without --limit it is nearly all that the control group has left, or half of what the machine has available. Where it is
too small the program goes on, slowly: --stats and `farheap top` show it by bytes read that are many times the data.

FARHEAP_CONF and --config set every option of farheap; the other options of this command come last.
The default of `threshold` is 0 here: small allocations go far, too.")]
pub(crate) struct Run {
    /// Maximum resident memory of the process, such as 1GiB, or 25% of what it may have: the control group's limit or the
    /// machine's memory
    #[arg(long, value_name = "SIZE")]
    limit: Option<String>,
    /// Block device, file or server (nbd://HOST/EXPORT) that keeps evicted pages; its contents are lost
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    device: Option<String>,
    /// More options, such as `dir:/var/tmp,poll:off`
    #[arg(long, value_name = "TEXT")]
    config: Option<String>,
    /// Print at the end what was far, faults, bytes, and the peak against the limit
    #[arg(long)]
    stats: bool,
    /// Leave the programs that this one starts on their own memory
    #[arg(long)]
    alone: bool,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM", value_hint = ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

/// Runs the program in place of this one; returns only if that is not possible.
pub(crate) fn run(options: &Run) -> ExitCode {
    let name = Path::new(&options.program[0]);
    let fail = |status: u8, reason: &str| {
        eprintln!("farheap: {reason}");
        ExitCode::from(status)
    };
    let path = match program::check(name) {
        Ok(path) => path,
        Err(RunRefusal::Missing) => {
            return fail(EXIT_NOT_FOUND, &format!("{}: not found", name.display()));
        }
        Err(RunRefusal::NoProgram(reason)) => return fail(EXIT_NOT_EXECUTABLE, &reason),
        Err(RunRefusal::Unsuitable(reason)) => return fail(EXIT_REFUSED, &reason),
    };
    let prepared = library::find().and_then(|library| Ok((library, configuration(options)?)));
    let (library, config) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => return fail(EXIT_REFUSED, &reason),
    };
    // The program has this process's number: of those that it starts, only some are worth a report.
    let mut words = vec![format!("first={}", std::process::id())];
    words.extend(options.stats.then(|| "stats".to_owned()));
    words.extend(options.alone.then(|| "alone".to_owned()));
    let mut preload = library.into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(&path);
    command.envs(room_under_audit());
    let error = command
        .arg0(&options.program[0])
        .args(&options.program[1..])
        .env(Builder::ENV, config.to_string())
        .env(RUN_VARIABLE, words.join(","))
        .env("LD_PRELOAD", preload)
        .exec();
    fail(EXIT_NOT_EXECUTABLE, &format!("{}: {error}", path.display()))
}

/// With `LD_AUDIT` the loader has reserved the threads' memory before it loads what is preloaded, and ends the program for
/// want of room unless it was told how much will be needed (`GLIBC_TUNABLES`).
fn room_under_audit() -> Option<(&'static str, OsString)> {
    const TUNABLES: &str = "GLIBC_TUNABLES";
    std::env::var_os("LD_AUDIT").filter(|audit| !audit.is_empty())?;
    let mut tunables = OsString::from("glibc.rtld.optional_static_tls=8192");
    // The last one holds.
    if let Some(said) = std::env::var_os(TUNABLES).filter(|said| !said.is_empty()) {
        tunables.push(":");
        tunables.push(said);
    }
    Some((TUNABLES, tunables))
}

/// The configuration, with which a heap was started and ended here.
fn configuration(options: &Run) -> Result<Builder, String> {
    let read = || {
        let mut builder = Heap::builder().threshold(farheap::ByteCount::ZERO).from_env()?;
        if let Some(text) = &options.config {
            builder = builder.parse(text)?;
        }
        if let Some(limit) = &options.limit {
            builder = builder.set("limit", limit)?;
        }
        if let Some(device) = &options.device {
            // As text, so that a device takes the place of a directory that was named before.
            let quoted = device.replace('"', "\"\"");
            builder = builder.parse(&format!("device:\"{quoted}\""))?;
        }
        Ok(builder)
    };
    let builder = read().map_err(|error: farheap::Error| error.to_string())?;
    let region = builder.region().map_err(|error| error.to_string())?;
    if region.mode == FaultMode::InThread {
        // A program may have a handler of its own for the signal, and the C library waits for locks in far
        // memory by system calls, which nothing outside of it can see coming.
        let reason = "`mode:in_thread` serves no fault of a system call, and of a program with a handler for \
                      SIGBUS none at all; leave `mode` out";
        return Err(reason.to_owned());
    }
    // The program would find out in the middle of its work, where it can only go on without far memory.
    let heap = builder.clone().start().map_err(|error| error.to_string())?;
    let has_far = heap.threshold().is_some() || builder.get("threshold").as_deref() == Some("off");
    heap.shutdown().map_err(|error| error.to_string())?;
    if has_far {
        return Ok(builder);
    }
    Err("nothing of the program would be far memory; `farheap doctor` shows the command that permits faults of \
         the kernel"
        .to_owned())
}
