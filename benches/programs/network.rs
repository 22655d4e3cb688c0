//! Far memory on servers beside the file on this machine's disk: the same program, in groups of one size.

use crate::child::{Side, Task};
use crate::servers::{Kind, Server};
use crate::{Args, Failure, Outcome, Result, Row, compare};
use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Servers that hold a program's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Servers {
    /// One
    One,
    /// Two, each with all pages
    Copies,
    /// Five, of which one may be lost
    Parity,
    /// Three, each with all pages, of which one is killed and then one stops
    Dying,
}

/// Seconds that nothing may stall, whatever servers do.
const STALL_MAX: f64 = 2.0;

/// Room that pages take on a server at most: those that are written anew have two places for a moment.
const MIB: u64 = 4096;

impl Servers {
    fn name(self) -> &'static str {
        match self {
            Servers::One => "on one server",
            Servers::Copies => "on two copies",
            Servers::Parity => "on servers with parity 4+1",
            Servers::Dying => "on three copies of which two die",
        }
    }

    fn start(self) -> Result<(Vec<Server>, String)> {
        let count = match self {
            Servers::One => 1,
            Servers::Copies => 2,
            Servers::Parity => 5,
            Servers::Dying => 3,
        };
        let start = |_| Server::start(Kind::Nbdkit, MIB);
        let servers: Vec<Server> = (0..count).map(start).collect::<Result<_>>()?;
        let addresses: Vec<String> =
            servers.iter().map(|server| server.address.to_string()).collect();
        let parity = if self == Servers::Parity { "&parity=1" } else { "" };
        Ok((servers, format!("device:\"{}{parity}\"", addresses.join(","))))
    }
}

/// Runs a program in groups of `memory` bytes: on the default file and on each of the servers, in turns.
pub(crate) fn run(
    args: &Args,
    name: &str,
    task: &Task,
    memory: usize,
    right: &Outcome,
) -> Result<Vec<Row>> {
    let deadline = Duration::from_secs(args.deadline);
    let mut sides: Vec<(Servers, Vec<Outcome>)> =
        args.servers.iter().map(|servers| (*servers, Vec::new())).collect();
    let mut files = Vec::new();
    for _ in 0..args.rounds() {
        let outcome = task.run(Side::Far, Some(memory), deadline)?;
        outcome.check(right)?;
        files.push(outcome);
        for (servers, outcomes) in &mut sides {
            // Anew each time: a server with pages of another heap is refused.
            let (running, conf) = servers.start()?;
            let mut task = task.clone();
            (task.conf, task.watches) = (conf, true);
            let run = || task.run(Side::Far, Some(memory), deadline);
            let outcome = match servers {
                Servers::Dying => dying(running, files[0].sum(|phase| phase.secs), run)?,
                _ => run()?,
            };
            outcome.check(right)?;
            outcomes.push(outcome);
        }
    }
    let rows = |(servers, outcomes): &(Servers, Vec<Outcome>)| {
        let name = format!("{name} {}", servers.name());
        let mut rows = compare(&name, outcomes, Side::Far, &files);
        let stalls: Vec<f64> = outcomes.iter().map(|outcome| outcome.stall).collect();
        let (work, base) = ((format!("{name}, longest stall"), "s"), vec![STALL_MAX; stalls.len()]);
        let base = ("allowed".to_owned(), base);
        rows.push(Row::of_rounds(work, stalls, base, |value, base| base / value, Some(1.0)));
        rows
    };
    Ok(sides.iter().flat_map(rows).collect())
}

/// Runs a program, and has the first server killed and the second one stopped meanwhile: after a quarter and half of
/// the seconds that it takes on the file.
fn dying(
    mut servers: Vec<Server>,
    secs: f64,
    run: impl FnOnce() -> Result<Outcome>,
) -> Result<Outcome> {
    let quarter = Duration::from_secs_f64(secs / 4.0);
    let (told, is_over) = channel::<()>();
    let (outcome, are_dead) = std::thread::scope(|scope| {
        let dies = scope.spawn(move || {
            let comes = |_: &u32| is_over.recv_timeout(quarter) == Err(RecvTimeoutError::Timeout);
            let deaths = (0..2).take_while(comes).map(|number| match number {
                0 => drop(servers.remove(0)),
                // The server's process is this one's child, so the number is still its.
                _ => kill(Pid::from_raw(servers[0].id() as i32), Signal::SIGSTOP).expect("a child"),
            });
            (deaths.count() == 2, servers)
        });
        let outcome = run();
        drop(told);
        let (are_dead, _servers) = dies.join().expect("it does not panic");
        (outcome, are_dead)
    });
    match are_dead {
        true => outcome,
        false => outcome.and(Err(Failure::Broken("it ended before two servers did".to_owned()))),
    }
}
