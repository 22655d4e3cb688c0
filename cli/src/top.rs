//! `farheap top`: what a running process has in far memory and does with it.
//!
//! A process with a far heap writes its statistics once a second into a file in memory, one for each tier,
//! which the kernel lets processes of the same user open by `/proc/PID/fd`. The process itself does nothing for it.
//!
//! # Invariants
//! 1. Nothing that the process says is believed: root looks at processes of others, and a file of this name may hold
//!    anything. What is read is bounded, names have letters only, and numbers may be any.

mod prometheus;

use farheap::ByteCount;
use farheap_nbd::SERVERS_MAX;
use prometheus::Exposition;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Exit status when there is nothing to show.
const EXIT_FAIL: u8 = 1;
/// Names of the files.
const LINK: &str = "/memfd:farheap-stats";
/// Maximum number of tiers that are shown, and of bytes that one may have to say: both more than the library has.
const TIERS_MAX: usize = 16;
const TEXT_MAX: u64 = 64 << 10;
/// Maximum length of a tier's or a number's name.
const NAME_MAX: usize = 64;
/// How often a text that is being written is read again.
const TRIES: usize = 20;
/// The same where all processes are looked at: any of them may hold another text under this name, and in many files.
const TRIES_OF_ALL: usize = 3;
/// Characters of the bar that shows how full a tier is.
const BAR: usize = 30;

/// Shows what a running process has in far memory, live: resident bytes against the limit, faults and
/// their latency, what the device reads and writes.
///
/// Latencies are from reading a fault's event to its answer, since the start of the process. Rates are of
/// the time between two looks, `-` at the first; the process writes its numbers once a second.
#[derive(clap::Args)]
#[command(after_help = "Faults in a second:
  read         waited for the device: thousands all the time say that the limit is small
  zero         first touches
  cooling      the page had not left yet
  first write  to a page that was brought in to be read
  starved      waited for room: above zero all the time says that the limit is too small

Exit status:
  0  shown, until the process ended or as often as asked for
  1  no such process, no far heap in it, or no permission (it takes its user, or root)")]
pub(crate) struct Top {
    /// Process to look at
    #[arg(value_name = "PID", required_unless_present = "prometheus")]
    pid: Option<u32>,
    /// Time between two looks, such as 2s; at least 100ms
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// End after this many looks
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Print one JSON object for each look instead of the table
    #[arg(long)]
    json: bool,
    /// Print once what a collector of Prometheus reads: of the process, or of all with a far heap that this user may look at
    #[arg(long, conflicts_with_all = ["interval", "count", "json"])]
    prometheus: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time < Duration::from_millis(100) {
        return Err("must be at least 100ms".to_owned());
    }
    Ok(time)
}

/// Report of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TierReport {
    name: String,
    values: BTreeMap<String, u64>,
}

impl TierReport {
    fn value(&self, name: &str) -> u64 {
        self.values.get(name).copied().unwrap_or_default()
    }

    fn bytes(&self, name: &str) -> ByteCount {
        ByteCount(self.value(name))
    }
}

/// One look at the process.
#[derive(Debug)]
struct Look {
    at: Instant,
    tiers: Vec<TierReport>,
}

/// Looks until the process has ended.
pub(crate) fn top(options: &Top) -> ExitCode {
    let shown = match options.pid {
        _ if options.prometheus => print_prometheus(options.pid),
        Some(pid) => watch(pid, options),
        None => unreachable!("clap has asked for a process"),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("farheap: {reason}");
            ExitCode::from(EXIT_FAIL)
        }
    }
}

/// Prints the numbers of one process, or of all that can be read.
fn print_prometheus(pid: Option<u32>) -> Result<(), String> {
    let mut exposition = Exposition::default();
    match pid {
        Some(pid) => {
            let tiers = read_all(&find(pid)?, TRIES);
            if tiers.is_empty() {
                return Err(unreadable(pid));
            }
            exposition.add(pid, &program(pid), resident(pid), &tiers);
        }
        None => {
            let entries = fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?;
            let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            for pid in names.filter_map(|name| name.parse().ok()) {
                // Processes end, and most have no far heap.
                let tiers = read_all(&find(pid).unwrap_or_default(), TRIES_OF_ALL);
                if !tiers.is_empty() {
                    exposition.add(pid, &program(pid), resident(pid), &tiers);
                }
            }
        }
    }
    print(&exposition.text()).map(|_| ())
}

/// Prints a text; `false` if the reader of a pipe has stopped.
fn print(text: &str) -> Result<bool, String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// The name of a process, as it has set it, without what a terminal could take for a command.
fn program(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().escape_default().to_string()
}

fn watch(pid: u32, options: &Top) -> Result<(), String> {
    let files = find(pid)?;
    let title = format!("{} ({pid})", program(pid));
    let clear = std::io::stdout().is_terminal() && !options.json;
    let mut before: Option<Look> = None;
    let mut looks = 0;
    while options.count != Some(looks) {
        if looks > 0 {
            // The user asked for one look each interval.
            std::thread::sleep(options.interval);
        }
        let tiers = read_all(&files, TRIES);
        if tiers.is_empty() {
            return if looks > 0 { Ok(()) } else { Err(unreadable(pid)) };
        }
        let look = Look { at: Instant::now(), tiers };
        let resident = resident(pid);
        let text = if options.json {
            format!("{}\n", as_json(pid, resident, &look))
        } else {
            table(&title, resident, &look, before.as_ref())
        };
        // Cursor to the corner, and what is below it cleared.
        let start = if clear { "\x1b[H\x1b[J" } else { "" };
        if !print(&format!("{start}{text}"))? {
            return Ok(());
        }
        before = Some(look);
        looks += 1;
    }
    Ok(())
}

fn missing(pid: u32) -> String {
    format!("process {pid} has no far heap (a program under `farheap run` starts it at 6 MiB)")
}

fn unreadable(pid: u32) -> String {
    format!(
        "process {pid} has no statistics that this version of farheap can read, or has just ended"
    )
}

/// The files that the process writes.
fn find(pid: u32) -> Result<Vec<PathBuf>, String> {
    let dir = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = fs::read_dir(&dir).map_err(|error| match error.kind() {
        ErrorKind::NotFound => format!("there is no process {pid}"),
        ErrorKind::PermissionDenied => {
            format!("process {pid} is another user's: only that user and root may look at it")
        }
        _ => format!("{}: {error}", dir.display()),
    })?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths.filter(|path| is_ours(path)).take(TIERS_MAX).collect();
    files.sort();
    if files.is_empty() { Err(missing(pid)) } else { Ok(files) }
}

/// True if a descriptor is of a file that is called as farheap's are.
fn is_ours(descriptor: &Path) -> bool {
    fs::read_link(descriptor).is_ok_and(|to| to.to_string_lossy().starts_with(LINK))
}

/// Opens a file of the process that is a regular one and called so. The process may have put another one in its
/// place: to open a pipe waits for the other end, and with some devices it does something.
fn open(file: &Path) -> Option<File> {
    let of_path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(file).ok()?;
    let own = PathBuf::from(format!("/proc/self/fd/{}", of_path.as_raw_fd()));
    let is_regular = of_path.metadata().is_ok_and(|about| about.is_file());
    if is_regular && is_ours(&own) { File::open(own).ok() } else { None }
}

/// Reads what each tier says.
fn read_all(files: &[PathBuf], tries: usize) -> Vec<TierReport> {
    files.iter().filter_map(|file| read(file, tries)).collect()
}

/// Reads what a tier says; `None` when the process has ended, has not written it yet, or it is none of farheap's texts.
fn read(file: &Path, tries: usize) -> Option<TierReport> {
    let text = || {
        let mut text = String::new();
        open(file)?.take(TEXT_MAX).read_to_string(&mut text).ok()?;
        Some(text)
    };
    (0..tries).find_map(|_| {
        let tier = text().and_then(|text| parse(&text));
        if tier.is_none() {
            // The process writes its file without a lock, and tells nobody when it is whole.
            std::thread::sleep(Duration::from_millis(10));
        }
        tier
    })
}

/// True if a word can be the name of a tier or of a number.
fn is_name(word: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=NAME_MAX).contains(&word.len()) && word.bytes().all(is_plain)
}

/// `None` for a text that is not whole, and for one of another format.
fn parse(text: &str) -> Option<TierReport> {
    let mut lines = text.lines();
    let generation = lines.next()?.strip_prefix("farheap-stats 1 ")?;
    let tier = lines.next()?.strip_prefix("tier ").filter(|name| is_name(name))?.to_owned();
    let mut values = BTreeMap::new();
    // A text that is shorter than the one before is followed by what is left of that.
    for line in lines {
        let (name, value) = line.split_once(' ')?;
        if name == "end" {
            return (value == generation).then_some(TierReport { name: tier, values });
        }
        if !is_name(name) {
            return None;
        }
        values.insert(name.to_owned(), value.parse().ok()?);
    }
    None
}

/// Resident bytes of the process, as `proc_pid_status(5)` has them; zero when it has ended.
fn resident(pid: u32) -> ByteCount {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    ByteCount::kib(line.trim().trim_end_matches(" kB").parse().unwrap_or_default())
}

fn as_json(pid: u32, resident: ByteCount, look: &Look) -> Value {
    let tiers: Map<String, Value> =
        look.tiers.iter().map(|tier| (tier.name.clone(), json!(tier.values))).collect();
    json!({ "pid": pid, "resident_bytes": resident.0, "tiers": tiers })
}

fn table(title: &str, resident: ByteCount, look: &Look, before: Option<&Look>) -> String {
    let mut text = format!("{title}: process {resident} resident");
    if let Some(first) = look.tiers.first() {
        let limit = first.bytes("process_limit_bytes");
        if limit > ByteCount::ZERO {
            // Writing into a string does not fail, here and below.
            let _ = write!(text, " of {limit}");
        }
        let _ = write!(text, ", local memory {}", first.bytes("local_bytes"));
    }
    text.push('\n');
    for tier in &look.tiers {
        let earlier = before.and_then(|before| {
            let same = before.tiers.iter().find(|earlier| earlier.name == tier.name)?;
            Some((same, look.at.duration_since(before.at).as_secs_f64()))
        });
        // Nothing fails.
        let _ = print_tier(&mut text, tier, earlier);
    }
    text
}

fn print_tier(
    text: &mut String,
    tier: &TierReport,
    earlier: Option<(&TierReport, f64)>,
) -> std::fmt::Result {
    // Nothing is known of the time before the first look.
    let rate = |name: &str| {
        earlier.map(|(before, seconds)| {
            tier.value(name).saturating_sub(before.value(name)) as f64 / seconds
        })
    };
    let faults =
        |name: &str| rate(name).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
    let bytes = |name: &str| {
        rate(name).map_or_else(|| "-".to_owned(), |rate| ByteCount(rate as u64).to_string())
    };
    let us = |name: &str| format!("{:.0} us", tier.value(name) as f64 / 1e3);
    let (resident, limit) = (tier.bytes("resident_bytes"), tier.bytes("limit_bytes"));
    let full = (BAR as u128 * u128::from(resident.0) / u128::from(limit.0.max(1))).min(BAR as u128)
        as usize;
    let bar = "#".repeat(full) + &"-".repeat(BAR - full);
    writeln!(text, "tier {}", tier.name)?;
    writeln!(
        text,
        "  resident   [{bar}] {resident} of {limit}, peak {}",
        tier.bytes("resident_bytes_max")
    )?;
    writeln!(
        text,
        "  far        {} in use, {} of it allocated in blocks, {} on the device, {} of tables",
        tier.bytes("committed_bytes"),
        tier.bytes("allocated_bytes"),
        tier.bytes("stored_bytes"),
        tier.bytes("metadata_bytes"),
    )?;
    writeln!(
        text,
        "  faults/s   {} read, {} zero, {} cooling, {} first write, {} starved",
        faults("faults_read"),
        faults("faults_zero"),
        faults("faults_cooling"),
        faults("faults_protect"),
        faults("faults_starved"),
    )?;
    let [median, tail, max] = ["fault_ns_p50", "fault_ns_p99", "fault_ns_max"].map(us);
    writeln!(
        text,
        "  latency    half of the faults within {median}, 99 % within {tail}, longest {max}"
    )?;
    writeln!(
        text,
        "  device/s   {} read, {} written; requests in flight {} and {}",
        bytes("bytes_read"),
        bytes("bytes_written"),
        tier.value("reads_in_flight"),
        tier.value("writes_in_flight"),
    )?;
    print_more_memory(text, tier)?;
    for at in 0..SERVERS_MAX {
        print_server(text, tier, &format!("server{at}"))?;
    }
    let troubles = ["read_errors", "write_errors", "checksum_errors", "poisoned", "panics"];
    for name in troubles.into_iter().filter(|name| tier.value(name) > 0) {
        writeln!(text, "  TROUBLE    {name}: {}", tier.value(name))?;
    }
    Ok(())
}

/// Prints how many of the reads more memory would have saved, where there were some.
fn print_more_memory(text: &mut String, tier: &TierReport) -> std::fmt::Result {
    let read = tier.value("pages_in");
    if read == 0 {
        return Ok(());
    }
    let part = |name: &str| 100 * tier.value(&format!("reads_saved_by_{name}")) / read;
    let [eighth, quarter] = ["eighth", "quarter"].map(part);
    writeln!(
        text,
        "  more       1/8 more memory would have saved {eighth} % of all reads, 1/4 {quarter} %"
    )
}

/// Prints a line on a server that the tier's pages are on, if there is one of this name.
fn print_server(text: &mut String, tier: &TierReport, server: &str) -> std::fmt::Result {
    let value = |name: &str| tier.value(&format!("{server}_{name}"));
    let us = |name: &str| value(name) as f64 / 1e3;
    let Some(state) = tier.values.get(&format!("{server}_state")) else { return Ok(()) };
    let state = match state {
        0 if value("lacking_bytes") > 0 => "behind",
        0 => "up",
        1 => "lost",
        _ => "taken by another client, or empty",
    };
    writeln!(
        text,
        "  {server:<10} {state}, half of the reads within {:.0} us, 95 % {:.0}, 99 % {:.0}, {} in flight, {} for others that were late, \
         {} computed by others, {} connections made, {} to be copied to it",
        us("read_ns_p50"),
        us("read_ns_p95"),
        us("read_ns_p99"),
        value("in_flight"),
        value("hedges"),
        value("rebuilt"),
        value("connections"),
        ByteCount(value("lacking_bytes")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_two_moments_is_not_taken() {
        let whole = "farheap-stats 1 7\ntier far\nresident_bytes 5\nend 7\n";
        let tier = parse(whole).expect("whole");
        assert_eq!((tier.name.as_str(), tier.value("resident_bytes")), ("far", 5));
        // What a longer text has left behind.
        assert_eq!(parse(&format!("{whole}ax 4\nend 6\n")).expect("whole"), tier);
        for broken in [
            "",
            "farheap-stats 1 8\ntier far\nresident_bytes 5\nend 7\n",
            "farheap-stats 1 7\ntier far\nresident_bytes 5\n",
            "farheap-stats 1 7\ntier far\nresident_bytes\nend 7\n",
            "farheap-stats 2 7\ntier far\nend 7\n",
            "farheap-stats 1 7\ntier \x1b[31mfar\nend 7\n",
            "farheap-stats 1 7\ntier far\nresident\u{9b}31m_bytes 5\nend 7\n",
            "farheap-stats 1 7\ntier far\nresident_bytes -5\nend 7\n",
            "farheap-stats 1 7\ntier far\nresident_bytes 99999999999999999999\nend 7\n",
            "farheap-stats 1 7\ntier \nend 7\n",
        ] {
            assert_eq!(parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let tier = |faults| TierReport {
            name: "far".to_owned(),
            values: BTreeMap::from([
                ("faults_read".to_owned(), faults),
                ("limit_bytes".to_owned(), 8),
            ]),
        };
        let mut text = String::new();
        print_tier(&mut text, &tier(70), Some((&tier(20), 2.0))).expect("a string");
        assert!(text.contains("faults/s   25 read"), "{text}");
        text.clear();
        print_tier(&mut text, &tier(70), None).expect("a string");
        assert!(text.contains("faults/s   - read"), "there is no rate yet: {text}");
    }

    #[test]
    fn a_server_that_lacks_pages_is_behind() {
        let names = [("server1_state", 0), ("server1_lacking_bytes", 4096), ("server1_hedges", 7)];
        let values = names.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let mut text = String::new();
        print_tier(&mut text, &TierReport { name: "far".to_owned(), values }, None)
            .expect("a string");
        assert!(text.contains("  server1    behind, ") && text.contains(" 7 "), "{text}");
        assert!(!text.contains("server0"), "{text}");
    }

    #[test]
    fn any_numbers_are_printed() {
        let names = ["resident_bytes", "limit_bytes", "faults_read", "bytes_read", "fault_ns_max"];
        let tier = |value: u64| TierReport {
            name: "far".to_owned(),
            values: names.iter().map(|name| ((*name).to_owned(), value)).collect(),
        };
        for (before, now) in [(u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX)] {
            let mut text = String::new();
            print_tier(&mut text, &tier(now), Some((&tier(before), 1e-9))).expect("a string");
            let bar = "#".repeat(if now > 0 { BAR } else { 0 });
            assert!(text.contains(&format!("[{bar}")), "{text}");
        }
    }
}
